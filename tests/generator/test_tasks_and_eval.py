"""Built-in tasks as files, reading JSON lines, and `umbra eval` / `umbra make-task`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbra.proto.errors import UmbraError
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.generator.command import evaluate, make_task
from umbra.services.generator.tasks import write_task
from umbra.services.process.files import read_jsonl

COUNTS: dict[str, Any] = {"prompts": 300, "heldout": 100, "demos": 300}


def run(command: Any, *args: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def files(out: Path) -> list[list[dict[str, Any]]]:
    return [read_jsonl(out / f"{name}.jsonl") for name in ("prompts", "heldout", "demos")]


def test_sort_is_solvable_and_held_out_prompts_are_new(tmp_path: Path) -> None:
    assert write_task("sort", tmp_path, seed=0, **COUNTS)["prompts.jsonl"] == 300
    write_task("sort", tmp_path / "other", seed=1, **COUNTS)
    prompts, held, demos = files(tmp_path)
    for row in [*prompts, *held]:
        environment = ExactMatch()
        environment.reset(row)
        assert environment.step("".join(sorted(row["prompt"]))).reward == 1.0
    seen = {row["prompt"] for row in [*prompts, *files(tmp_path / "other")[0]]}
    seen |= {row["messages"][0]["content"] for row in demos}
    assert not seen & {row["prompt"] for row in held}
    assert {2, 16} <= {len(row["prompt"]) for row in held}
    right = sum(
        "".join(sorted(row["messages"][0]["content"])) == row["messages"][1]["content"]
        for row in demos
    )
    assert 0.2 < right / len(demos) < 0.5


def test_guess_demos_are_conversations_with_the_environment(tmp_path: Path) -> None:
    write_task("guess", tmp_path, seed=0, **COUNTS)
    prompts, held, demos = files(tmp_path)
    assert (
        {row["answer"] for row in prompts} == {row["answer"] for row in held} == set("0123456789")
    )

    def agrees(turns: list[str], secret: int) -> bool:
        environment = Guess()
        environment.reset({"prompt": turns[0], "answer": str(secret)})
        heard = [environment.step(said) for said in turns[1::2]]
        answers = [result.messages[0]["content"] for result in heard if not result.done]
        done = [result.done for result in heard]
        return answers == turns[2::2] and done.count(True) == 1 and done[-1]

    for demo in demos:
        turns = [m["content"] for m in demo["messages"]]
        assert any(agrees(turns, secret) for secret in range(10)), turns


def test_make_task_and_eval(tmp_path: Path, tiny_model_dir: Path) -> None:
    out = tmp_path / "task"
    assert "100 rows in heldout.jsonl" in run(make_task, "guess", "--out", out, "--heldout", "100")
    sets = ("sampling.max_tokens=4", "generator.device=cpu", "environment.kind=guess")
    options = ("--samples", 64, *(word for one in sets for word in ("--set", one)))
    held = ("--prompts", out / "heldout.jsonl")
    text = run(evaluate, tiny_model_dir, *held, *options, "--json")
    result = json.loads(text)
    assert result["samples"] == 64
    assert result["failed"] == 0
    assert 0 <= result["accuracy"] <= 1
    assert 1 <= result["mean_tokens"] <= 16
    assert run(evaluate, tiny_model_dir, *held, *options, "--greedy").startswith("accuracy 0.")
    assert "1.00 turns" in run(
        evaluate, tiny_model_dir, *held, *options, "--set", "environment.options.tries=1"
    )


OUT = ("--out", "BARE")
GROUPS = ("--set", "environment.kind=reward", "--set", "environment.reward_scope=group")


def test_errors(tmp_path: Path, tiny_model_dir: Path) -> None:
    for command, args, says in (
        (make_task, ["sort", "--option", "a=1", *OUT], "for verifiers:ID, not for sort"),
        (make_task, ["verifiers:one", "--demos", "3", *OUT], "--demos: verifiers:one has none"),
        (make_task, ["sorts", *OUT], "task 'sorts' is unknown; use sort, guess"),
        (evaluate, ["MODEL"], "give --prompts FILE, or a --config"),
        (evaluate, ["nowhere", "--prompts", "ROWS"], "MODEL: nowhere is no directory"),
        (evaluate, ["BARE", "--prompts", "ROWS"], "has no tokenizer"),
        (evaluate, ["MODEL", "--prompts", "EMPTY"], "is empty"),
        (evaluate, ["MODEL", "--prompts", "ROWS", *GROUPS], "set eval.prompts in the run"),
        (evaluate, ["MODEL", "--prompts", "ROWS", "--config", "TWO"], "the first: .* is None"),
    ):
        files = ("bare", "empty.jsonl", "rows.jsonl", "two.toml")
        bare, empty, rows, two = (tmp_path / name for name in files)
        bare.mkdir(exist_ok=True)
        two.write_text('[[environments]]\nname = "a"\n[[environments]]\nname = "b"\n')
        (bare / "config.json").write_text("{}")
        empty.write_text("")
        rows.write_text('{"prompt": "a", "answer": "b"}\n')
        names = {"MODEL": tiny_model_dir, "BARE": bare, "EMPTY": empty, "ROWS": rows, "TWO": two}
        with pytest.raises(UmbraError, match=says):
            run(command, *[names.get(arg, arg) for arg in args])
