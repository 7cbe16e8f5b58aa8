"""Examples: run files are valid, rewards and environments do what they say, some learn."""

import asyncio
import json
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds

from umbra.cli import main
from umbra.deploy.commands.demo import DEMOS, RECIPES
from umbra.services.config.loader import load_config
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import (
    Opening,
    ParsedTurn,
    Response,
    StepResult,
    tool_call,
)
from umbra.services.environments.sandbox import CommandOutcome, Sandbox
from umbra.services.environments.worker import EnvironmentHost
from umbra.services.generator.checks import check_environment
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser
from umbra.services.modeling.run_file import located
from umbra.services.process.files import read_jsonl
from umbra.services.prompts import read_source

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLUSTERS = sorted((EXAMPLES / "cluster").glob("*.toml"))


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


# -- run files -------------------------------------------------------------------------------------


def test_a_run_file_is_valid_and_says_how_to_run_it() -> None:
    paths = set(EXAMPLES.rglob("*.toml")) - {*CLUSTERS}
    for path in paths:
        config = load_config(path, environ={})
        assert config.model.path and config.data.prompts, path
        assert config.buffer.bound == config.buffer.max_staleness
        assert f"umbra up {path.relative_to(ROOT)}" in path.read_text(encoding="utf-8")
    assert {path.stem for path in DEMOS.glob("*.toml")} == set(RECIPES)
    assert set(RECIPES) < {path.stem for path in paths}


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


def test_own_data_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = EXAMPLES / "own-data" / "run.toml"
    monkeypatch.syspath_prepend(str(run_file.parent))
    monkeypatch.setenv("PYTHONPATH", str(run_file.parent))  # of the process that checks it
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    config = located(load_config(run_file, environ={}), run_file)
    plays = EnvironmentHost(load_environment(config.environment), "reward")
    for prompt in read_source(str(config.data.prompts)):
        check_environment(config, prompt.row)
        opening = asyncio.run(plays.play(prompt.prompt_id, prompt.row, []))
        assert isinstance(opening, Opening)
        assert opening.messages[-1]["content"] == prompt.row["prompt"]
        result = asyncio.run(plays.play(prompt.prompt_id, prompt.row, [""]))
        assert isinstance(result, StepResult) and result.done


# -- rewards and environments ----------------------------------------------------------------------


def test_rewards_are_what_answers_deserve() -> None:
    gsm8k, near = program("gsm8k_reward.py")["score"], program("smollm/reward.py")["score"]
    row = {"prompt": "How many?", "answer": "Natalia sold 48/2 = 24 in May.\n#### 72"}
    for said, reward in (
        ("<think>10 or 72</think>The answer is 72.", 1.0),
        ("It makes $1,072.50 in all", 0.0),
        ("<think>72</think>I don't know", 0.0),
    ):
        assert gsm8k(None, said, row) == reward
    for said, reward in (("47 + 38 = 85", 1.0), ("84", 5 / 11), ("75.", 0.25), ("none", 0.0)):
        assert near(None, said, {"answer": "85"}) == pytest.approx(reward)


def test_the_basket_of_the_shop_counts() -> None:
    for calls, told, reward in (
        ("price tea, price rice, add rice", ["9", "4", "in the basket: rice"], 1.0),
        ("add tea, add rice", ["in the basket: tea", "in the basket: tea, rice"], 0.0),
        ("steal rice, price gold", ["error: 'steal'", "error: 'gold'"], 0.0),
    ):
        shop = program("shop/shop.py")["Shop"]()
        opening = shop.reset({"prompt": "the cheapest?", "prices": {"tea": 9, "rice": 4}})
        assert [tool["function"]["name"] for tool in opening.tools] == ["price", "add"]
        words = (call.split() for call in calls.split(", "))
        turns = [ParsedTurn(text="call", tool_calls=[tool_call(n, {"item": i})]) for n, i in words]
        results = [shop.step(Response.of(turn)) for turn in (*turns, "done")]
        assert [m["content"] for result in results for m in result.messages] == told
        assert results[-1].done and sum(result.reward for result in results) == reward


def test_a_call_of_the_calculator_is_read_made_and_rewarded(tmp_path: Path) -> None:
    calculator = program("smollm/calculator.py")
    calculator["write"](tmp_path)
    row = read_jsonl(tmp_path / "products.jsonl")[0]
    world = calculator["Calculator"]()
    opening = world.reset(row)
    parser = ResponseTemplateParser("told", TOLD, told=True)
    (_, example), asked = opening.messages[:2], opening.messages[-1]
    a, b = asked["content"].removeprefix("What is ").removesuffix("?").split(" * ")
    call = example["content"].replace("23", a).replace("54", b)
    turns = [call, call.replace("multiply", "divide"), row["answer"]]
    results = [
        asyncio.run(world.step(Response.of(parser.read("", turn, opening.tools)))) for turn in turns
    ]
    assert [result.reward for result in results] == pytest.approx([0.2, 0.0, 0.8])
    assert results[0].messages == [{"role": "tool", "content": row["answer"]}]


def test_look_ups_tell_the_answer(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("mo:ka\nka:zu\n", encoding="utf-8")
    for turns, said, rewards in (
        (("?mo", "?ka", "zu"), ["mo:ka", "ka:zu"], [0, 0, 1]),
        (("?xx", "ka"), ["none"], [0, 0]),
        (("?mo",) * 4, ["mo:ka"] * 3, [0] * 4),  # three look-ups at most
    ):
        world = program("search/search.py")["Search"](str(tmp_path / "corpus.txt"))
        assert world.reset({"prompt": "mo", "answer": "zu"})[0]["content"] == "mo"
        results = [asyncio.run(world.step(turn)) for turn in turns]
        assert [result.reward for result in results] == rewards
        assert [m["content"] for result in results for m in result.messages] == said


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("search/search.py", "write"),
        ("coding/coding.py", "write"),
        ("smollm/prepare.py", "write_rows"),
    ],
)
def test_held_out_prompts_are_asked_nowhere_else(name: str, write: str, tmp_path: Path) -> None:
    made = program(name)[write]
    made.__globals__["DEMOS"] = 400
    made(tmp_path)
    held, *others = (
        {json.dumps(row.get("prompt") or row["messages"][0]["content"]) for row in read_jsonl(path)}
        for path in (tmp_path / f"{kind}.jsonl" for kind in ("heldout", "prompts", "demos"))
        if path.exists()
    )
    assert len(held) >= 50 and others
    assert not any(held & other for other in others)


# -- code that is written, in a sandbox ------------------------------------------------------------


def local(**limits: Any) -> Sandbox:
    return program("coding/local_process.py")["LocalProcess"](
        **{"command_s": seconds(60.0), **limits}
    )


def judged(body: str, said: str, sandbox: Sandbox) -> StepResult:
    """Return the environment's result for an answer to the function `body`."""
    coding = program("coding/coding.py")
    world, row = coding["Coding"](sandbox), coding["row_of"](body)
    assert world.reset(row) == [{"role": "user", "content": row["prompt"]}]

    async def once() -> StepResult:
        found = await world.step(said)
        await world.close()
        return found

    return asyncio.run(once())


def test_the_reward_is_the_share_of_tests_passed() -> None:
    for said, reward, runs in (
        ("def f(x): return 9 if x < 5 else x + x", 1.0, 1.0),
        ("def f(x):return 9", 0.5, 1.0),
        ("def f(x):return 2*(x", 0.0, 0.0),
        ("def f(x):exit(0)", 0.0, 1.0),
    ):
        found = judged("max(2*x,9)", said, local())
        assert found.done
        assert found.reward == reward
        assert found.reward_parts == {"runs": runs, "solved": float(reward == 1)}
    asleep = judged("2*x+9", "import time\ntime.sleep(600)", local(command_s=0.3))
    assert (asleep.reward, asleep.reward_parts["runs"]) == (0, 0)


class Listening:
    def __init__(self) -> None:
        self.given = ""

    async def run(self, command: Sequence[str], stdin: str = "") -> CommandOutcome:
        self.given += " ".join([*command, stdin])
        return CommandOutcome(0, "")

    async def close(self) -> None:
        pass


def test_the_sandbox_is_not_told_what_is_right() -> None:
    sandbox = Listening()
    assert judged("9*x*x+9", "def f(x):return x", sandbox).reward == 0
    assert "[1, 2, 3, 4, 5, 6, 7, 8]" in sandbox.given
    assert not [value for value in range(1, 9) if str(9 * value * value + 9) in sandbox.given]


def test_a_process_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hungry = "try:\n    bytearray(512 << 20)\nexcept MemoryError:\n    print('none')"
    large = "open('large', 'wb').write(bytes(2 << 20)); open('large', 'ab').write(b'more')"

    async def use() -> list[CommandOutcome]:
        one, other = local(), local()
        outcomes = [
            await one.run(["sh", "-c", "env; echo it > here"]),
            await other.run(["cat", "here"]),
            await one.run(["python3", "-I", "-S", "-"], hungry),
            await one.run(["python3", "-I", "-S", "-"], large),
        ]
        for each in (one, other):
            await each.close()
        return outcomes

    variables, others, memory, files = asyncio.run(use())
    assert "PATH=" in variables.output and "secret" not in variables.output
    assert others.code == 1
    assert memory == CommandOutcome(0, "none\n")
    assert files.code != 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("agent", ["codex", "claude_code", "mini_swe_agent", "aider"])
def test_agents_of_the_command_line_are_judged_by_what_they_leave(
    agent: str, tmp_path: Path
) -> None:
    """With a program in the agent's place; tests/real has the agents themselves."""
    script, seen = tmp_path / "script", tmp_path / "seen"
    script.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\ncat "$CODEX_HOME/config.toml" >> {seen}\n'
        "echo hello > made.txt\nexit 3\n"
    )
    script.chmod(0o700)
    play = program("coding/command_line_agents.py")[agent]
    endpoint = {"base_url": "http://127.0.0.1:9/sessions/s/v1", "api_key": "none"}
    rows = [
        {"prompt": "Write hello.", "check": f"grep -qx {word} made.txt"} for word in ("hello", "hi")
    ]
    assert [play(row, endpoint, program=str(script)) for row in rows] == [1.0, 0.0]
    assert "Write hello." in seen.read_text().splitlines()
    assert (endpoint["base_url"] in seen.read_text()) == (agent == "codex")


# -- what they learn -------------------------------------------------------------------------------


def trained(run_file: str, *settings: str) -> dict[str, Any]:
    """Return the summary of a run that ends well."""
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["up", str(EXAMPLES / run_file), *sets, "--quiet"]) == 0
    (summary,) = Path("runs").glob("*/summary.json")
    return json.loads(summary.read_text(encoding="utf-8"))


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_it_learns_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run file says, but for fewer steps."""
    monkeypatch.chdir(tmp_path)
    program("search/search.py")["write"](Path("search"))
    assert main(["make-model", "search/random"]) == 0
    warm = ["--data", "search/demos.jsonl", "--out", "search/base", "--threads", "1"]
    steps = ["--steps", "400", "--schedule", "linear"]
    assert main(["sft", "search/random", *warm, *steps]) == 0
    found = trained("search/run.toml", "run.steps=60")
    assert found["accuracy_after"] > found["accuracy_before"] + 0.2


@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_model_that_people_know_learns(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is converted, answers as SmolLM2 does, is equal in all rows, and learns."""
    monkeypatch.chdir(tmp_path)
    assert program("smollm/prepare.py")["prepare"](Path("smollm")) == 0
    if engine == "torch":
        assert main(["check-model", "smollm/model"]) == 0
    setting = f"generator.engine={engine}"
    assert main(["check", str(EXAMPLES / "smollm" / "run.toml"), "--set", setting]) == 0
    found = trained("smollm/run.toml", setting, "run.steps=20")
    assert found["ledger"]["balance"] == 0
    assert found["mismatch_k3_on_policy"] < 0.02
    assert found["accuracy_after"] > found["accuracy_before"] + 0.05
