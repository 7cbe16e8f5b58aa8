"""SmolLM2 on two-digit arithmetic (examples/smollm): its data, its reward, and what it learns."""

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from umbra.cli import main
from umbra.services.environments.protocol import Response
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

FOLDER = Path(__file__).parents[2] / "examples" / "smollm"
PROGRAM: dict[str, Any] = runpy.run_path(str(FOLDER / "prepare.py"))


@pytest.mark.parametrize(
    ("said", "reward"),
    [("85", 1.0), ("47 + 38 = 85", 1.0), ("84", 5 / 11), ("75.", 0.25), ("none", 0.0), ("", 0.0)],
)
def test_a_number_is_worth_more_the_nearer_it_is(said: str, reward: float) -> None:
    score = runpy.run_path(str(FOLDER / "reward.py"))["score"]
    assert score(None, said, {"answer": "85"}) == pytest.approx(reward)


def test_what_is_held_out_is_asked_nowhere_else(tmp_path: Path) -> None:
    PROGRAM["write_rows"](tmp_path)
    lines = {
        name: (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for name in ("prompts", "heldout")
    }
    assert len(lines["heldout"]) == 512
    assert not {*lines["heldout"]} & {*lines["prompts"]}
    for row in map(json.loads, lines["heldout"]):
        a, sign, b, *_ = row["prompt"][-1]["content"].split()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_call_of_the_calculator_is_read_made_and_rewarded(tmp_path: Path) -> None:
    program = runpy.run_path(str(FOLDER / "calculator.py"))
    program["write"](tmp_path)
    row = json.loads((tmp_path / "products.jsonl").read_text(encoding="utf-8").splitlines()[0])
    world = program["Calculator"]()
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


@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_model_that_people_know_learns(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel is converted, answers as SmolLM2 does, is equal in all rows, and learns."""
    monkeypatch.chdir(tmp_path)
    assert PROGRAM["prepare"](Path("smollm")) == 0
    if engine == "torch":
        assert main(["check-model", "smollm/model"]) == 0
    run_file = [str(FOLDER / "run.toml"), "--set", f"generator.engine={engine}"]
    assert main(["check", *run_file]) == 0
    assert main(["up", *run_file, "--set", "run.steps=20", "--quiet"]) == 0
    (summary,) = Path("runs").glob("*/summary.json")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["ledger"]["balance"] == 0
    assert found["mismatch_k3_on_policy"] < 0.02
    assert found["accuracy_after"] > found["accuracy_before"] + 0.05
