"""The search agent of examples/search: what it is told, rewarded with, and learns."""

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from umbra.cli import main

FOLDER = Path(__file__).parents[2] / "examples" / "search"
PROGRAM: dict[str, Any] = runpy.run_path(str(FOLDER / "search.py"))


def play(corpus: Path, row: dict[str, Any], *turns: str) -> tuple[list[str], list[float]]:
    world = PROGRAM["Search"](str(corpus))
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
    PROGRAM["write"].__globals__["DEMOS"] = 400
    PROGRAM["write"](tmp_path)
    files = {
        name: list(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines()))
        for name in ("prompts", "heldout", "demos")
    }
    asked = [{row["prompt"] for row in files[name]} for name in ("prompts", "heldout")]
    assert len(asked[0]) == 350
    assert len(asked[1]) == 50
    assert not asked[0] & asked[1]
    facts = dict(line.split(":") for line in (tmp_path / "corpus.txt").read_text().split())
    for row in [*files["prompts"], *files["heldout"]]:
        town = facts[row["prompt"]]
        _, rewards = play(
            tmp_path / "corpus.txt", row, f"?{row['prompt']}", f"?{town}", facts[town]
        )
        assert rewards[-1] == 1
    answers = {row["prompt"]: row["answer"] for row in files["prompts"]}
    right = [
        demo["messages"][-1]["content"] == answers[demo["messages"][0]["content"]]
        for demo in files["demos"]
    ]
    assert 0.2 < sum(right) / len(right) < 0.7


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_it_learns_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run file says, but for fewer steps."""
    monkeypatch.chdir(tmp_path)
    PROGRAM["write"](Path("search"))
    assert main(["make-model", "search/random"]) == 0
    warm = ["--data", "search/demos.jsonl", "--out", "search/base", "--threads", "1"]
    steps = ["--steps", "400", "--schedule", "linear"]
    assert main(["sft", "search/random", *warm, *steps]) == 0
    assert main(["up", str(FOLDER / "run.toml"), "--set", "run.steps=60", "--quiet"]) == 0
    (summary,) = Path("runs").glob("*/summary.json")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["accuracy_after"] > found["accuracy_before"] + 0.2
