"""Run files of examples are valid; their prompts, rewards and environments fit together."""

import asyncio
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from umbra.cli import main
from umbra.deploy.commands.demo import DEMOS, RECIPES
from umbra.deploy.prepare.preflight import search_path
from umbra.proto.errors import UsageError
from umbra.services.config.loader import load_config
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import (
    Opening,
    ParsedTurn,
    Response,
    StepResult,
    tool_call,
)
from umbra.services.environments.worker import EnvironmentHost
from umbra.services.generator.checks import check_environment
from umbra.services.modeling.run_file import load_service, located
from umbra.services.process.files import read_jsonl
from umbra.services.process.parent import SEARCH_VARIABLE
from umbra.services.prompts import read_source

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted((ROOT / "examples" / "cluster").glob("*.toml"))
SEARCH: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "search" / "search.py"))
RUN_FILES = sorted(set((ROOT / "examples").rglob("*.toml")) - {*CLUSTERS})


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_run_file_is_valid_and_says_how_to_run_it(path: Path) -> None:
    config = load_config(path, environ={})
    assert config.model.path
    assert config.data.prompts
    assert config.buffer.bound == config.buffer.max_staleness
    assert f"umbra up {path.relative_to(ROOT)}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_a_cluster_file_can_be_planned_as_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    comment = path.read_text(encoding="utf-8").split("\n\n[cluster]")[0]
    (command,) = re.findall(r"umbra (plan .*?)\n#\n|umbra (plan .*)$", comment, re.S)
    words = shlex.split(("".join(command)).replace("\\\n#", " "))
    assert "--dry-run" in words
    assert main(words) == 0
    assert "idle" not in capsys.readouterr().out


def test_every_demo_task_is_an_example() -> None:
    assert {path.stem for path in DEMOS.glob("*.toml")} == set(RECIPES)
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == {
        *RECIPES, "sort-vllm", "gsm8k-0.6b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("<think>10 or 72</think>The answer is 72.", 1.0),
        ("It makes $1,072.50 in all", 0.0),
        ("<think>72</think>I don't know", 0.0),
        ("72.0", 1.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_gsm8k(said: str, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    kind = load_config(ROOT / "examples" / "gsm8k-0.6b.toml", environ={}).environment
    pool = EnvironmentHost(load_environment(kind), "gsm8k")
    row = {"prompt": "How many?", "answer": "Natalia sold 48/2 = 24 in May.\n#### 72"}
    result = asyncio.run(pool.play("one", row, [said]))
    assert isinstance(result, StepResult)
    assert result.reward == reward


@pytest.mark.parametrize(
    ("calls", "told", "reward"),
    [
        (["price tea", "price rice", "add rice"], ["9", "4", "in the basket: rice"], 1.0),
        (["add tea", "add rice"], ["in the basket: tea", "in the basket: tea, rice"], 0.0),
        (["steal rice", "price gold", "add gold"], ["error: 'steal'", "error: 'gold'", None], 0.0),
        ([], [], 0.0),
        (["price tea"] * 6, ["9"] * 5, 0.0),
    ],
)
def test_the_basket_of_the_shop_counts(calls: list[str], told: list[str], reward: float) -> None:
    shop = runpy.run_path(str(ROOT / "examples" / "shop" / "shop.py"))["Shop"]()
    opening = shop.reset({"prompt": "the cheapest?", "prices": {"tea": 9, "rice": 4}})
    assert [tool["function"]["name"] for tool in opening.tools] == ["price", "add"]
    results: list[StepResult] = []
    for name, _, item in (call.partition(" ") for call in calls):
        said = ParsedTurn(text="call", tool_calls=[tool_call(name, {"item": item})])
        results.append(shop.step(Response.of(said)))
    if len(told) == len(calls):  # the turns are not over
        results.append(shop.step(Response.of("done")))
    answers = [message["content"] for result in results for message in result.messages]
    assert answers == [said if said else "in the basket: " for said in told]
    assert results[-1].done and sum(result.reward for result in results) == reward


def test_own_data_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = ROOT / "examples" / "own-data" / "run.toml"
    monkeypatch.syspath_prepend(str(run_file.parent))
    monkeypatch.setenv("PYTHONPATH", str(run_file.parent))  # of the process that checks it
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    config = located(load_config(run_file, environ={}), run_file)
    prompts = read_source(str(config.data.prompts))
    plays = EnvironmentHost(load_environment(config.environment), "reward")
    for prompt in prompts:
        check_environment(config, prompt.row)
        opening = asyncio.run(plays.play(prompt.prompt_id, prompt.row, []))
        assert isinstance(opening, Opening)
        assert opening.messages[-1]["content"] == prompt.row["prompt"]
        result = asyncio.run(plays.play(prompt.prompt_id, prompt.row, [""]))
        assert isinstance(result, StepResult)
        assert result.done


def test_paths_are_looked_up_beside_the_run_file_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (beside / "only.jsonl").touch()
    (here / "template.jinja").touch()
    monkeypatch.chdir(here)
    settings = ["data.prompts=both.jsonl", "eval.prompts=only.jsonl", "model.path=none"]
    settings.append("model.chat_template=template.jinja")
    config = load_config(overrides=settings, environ={})
    told: list[str] = []
    resolved = located(config, beside / "run.toml", told.append)
    assert resolved.data.prompts == str(beside / "both.jsonl")
    assert resolved.eval.prompts == str(beside / "only.jsonl")
    assert resolved.model.chat_template == str(here / "template.jinja")
    assert resolved.model.path == str(here / "none")
    (line,) = told
    assert line.startswith("both.jsonl is taken from the run file's folder")
    assert search_path(beside / "run.toml") == [beside, here]
    told.clear()
    assert located(config, here / "run.toml", told.append).data.prompts == str(here / "both.jsonl")
    assert told == []
    (beside / "run.toml").write_text('model.path = "only.jsonl"\ncritic.path = "acme/critic"\n')
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv(SEARCH_VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(SEARCH_VARIABLE)
    service = load_service(str(beside / "run.toml"), overrides=["run.steps=3"])
    assert (service.model.path, service.run.steps) == (str(beside / "only.jsonl"), 3)
    assert service.critic.path == "acme/critic"  # nothing is asked of a hub
    assert os.environ[SEARCH_VARIABLE].split(os.pathsep) == [str(beside), str(here)]
    assert sys.path[-2:] == [str(beside), str(here)]


def test_a_folder_of_a_data_set_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer has another current directory."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    (here / "rows").mkdir(parents=True)
    (beside / "more").mkdir(parents=True)
    (beside / "a:b").mkdir()
    monkeypatch.chdir(here)

    def resolved(name: str) -> str:
        config = load_config(overrides=[f"data.prompts={name}"], environ={})
        return str(located(config, beside / "run.toml").data.prompts)

    assert resolved("datasets:rows") == f"datasets:{here}/rows"
    assert resolved("datasets:more:train[:10]") == f"datasets:{beside}/more:train[:10]"
    for elsewhere in ("datasets:acme/sums:main:test", f"datasets:acme/sums@{'1' * 40}:test"):
        assert resolved(elsewhere) == elsewhere
    monkeypatch.chdir(beside / "a:b")
    (beside / "a:b" / "rows").mkdir()
    with pytest.raises(UsageError, match="which has a colon"):
        resolved("datasets:rows")


# -- an agent that searches -----------------------------------------------------------------------


def play(corpus: Path, row: dict[str, Any], *turns: str) -> tuple[list[str], list[float]]:
    world = SEARCH["Search"](str(corpus))
    said = [world.reset(row)[0]["content"]]
    rewards: list[float] = []
    for turn in turns:
        result = asyncio.run(world.step(turn))
        rewards.append(result.reward)
        said += [message["content"] for message in result.messages]
    return said, rewards


def test_two_look_ups_tell_the_answer(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("mo:ka\nka:zu\n", encoding="utf-8")
    row = {"prompt": "mo", "answer": "zu"}
    said, rewards = play(corpus, row, "?mo", "?ka", "zu")
    assert said == ["mo", "mo:ka", "ka:zu"]
    assert rewards == [0, 0, 1]
    assert play(corpus, row, "?xx", "ka") == (["mo", "none"], [0, 0])
    assert (play(corpus, row, *["?mo"] * 4))[1] == [0] * 4, "three look-ups at most"


def test_every_question_is_answered_by_the_corpus_and_the_teacher_is_poor(
    tmp_path: Path,
) -> None:
    SEARCH["write"].__globals__["DEMOS"] = 400
    SEARCH["write"](tmp_path)
    files = ("prompts", "heldout", "demos")
    prompts, held, demos = (read_jsonl(tmp_path / f"{name}.jsonl") for name in files)
    asked = [{row["prompt"] for row in rows} for rows in (prompts, held)]
    assert [len(one) for one in asked] == [350, 50]
    assert not asked[0] & asked[1]
    facts = dict(line.split(":") for line in (tmp_path / "corpus.txt").read_text().split())
    for row in [*prompts, *held]:
        town = facts[row["prompt"]]
        _, rewards = play(
            tmp_path / "corpus.txt", row, f"?{row['prompt']}", f"?{town}", facts[town]
        )
        assert rewards[-1] == 1
    answers = {row["prompt"]: row["answer"] for row in prompts}
    right = [
        demo["messages"][-1]["content"] == answers[demo["messages"][0]["content"]] for demo in demos
    ]
    assert 0.2 < sum(right) / len(right) < 0.7


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_it_learns_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run file says, but for fewer steps."""
    monkeypatch.chdir(tmp_path)
    SEARCH["write"](Path("search"))
    assert main(["make-model", "search/random"]) == 0
    warm = ["--data", "search/demos.jsonl", "--out", "search/base", "--threads", "1"]
    steps = ["--steps", "400", "--schedule", "linear"]
    assert main(["sft", "search/random", *warm, *steps]) == 0
    run_file = str(ROOT / "examples" / "search" / "run.toml")
    assert main(["up", run_file, "--set", "run.steps=60", "--quiet"]) == 0
    (summary,) = Path("runs").glob("*/summary.json")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["accuracy_after"] > found["accuracy_before"] + 0.2
