"""Rollouts as text: the trainer's file of a step, and its display."""

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner
from fakes.looks import heard, status
from fakes.trajectories import trajectory

from umbra.deploy.commands.runs import command
from umbra.deploy.run_folder import RunFolder, read_rollouts, rollout_text
from umbra.proto.records import Branch, Trajectory, VersionSpan
from umbra.services.trainer.rollout_log import EVERY_S, TOLD_CHARS, RolloutLog, spread, told

# A tokenizer whose tokens are bytes, so that a character may have several.
BYTES = Mock(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))


def rewarded(reward: float, **changes: Any) -> Trajectory:
    return trajectory(
        list(b"ask"), list(b"answer"), sample_id=f"s{reward:g}", reward=reward, **changes
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create("runs", "run")
    made.config.write_text("{}")
    return made


def logged(
    folder: RunFolder, count: int, steps: Iterable[tuple[int, list[Trajectory]]], **more: Any
) -> list[dict[str, Any]]:
    """The rows of these steps as they were told; they are in the folder too."""
    rows: list[dict[str, Any]] = []
    with closing(RolloutLog(folder.path, BYTES, count, rows.append, **more)) as log:
        for step, trajectories in steps:
            log.step(step, trajectories)
    return rows


def test_of_each_step_some_from_the_worst_to_the_best(folder: RunFolder) -> None:
    rewards = {1: (0.5, 3.0, 0.25, -1.0, 2.0), 2: (7.0, 6.0)}
    logged(folder, 3, ((step, [*map(rewarded, own)]) for step, own in rewards.items()))
    found = [(row["step"], row["reward"]) for row in read_rollouts(folder)]
    assert found == [(1, -1.0), (1, 0.5), (1, 3.0), (2, 6.0), (2, 7.0)]
    assert spread([rewarded(1.0), rewarded(2.0)], 1)[0].reward == 1.0


def test_a_rollout_has_its_facts(folder: RunFolder) -> None:
    response = "a☃b ☃?".encode()  # versions change within both snowmen
    mixed = trajectory(
        list(b"?"), list(response), sample_id="s", reward=1.0, reward_parts={"right": 1.0},
        loss_mask=b"\1" * 5 + b"\0" * 1 + b"\1" * (len(response) - 6), turns=2,
        spans=[
            VersionSpan(version=3, start=0, end=2),
            VersionSpan(version=5, start=2, end=8),
            VersionSpan(version=6, start=8, end=len(response)),
        ],
    )  # fmt: skip
    logged(folder, 4, [(7, [mixed])])
    (row,) = read_rollouts(folder)
    assert row["response"] == "a☃b ☃?"
    assert row["staleness"] == 3
    text = rollout_text(row)
    assert "reward 1 (right 1), 10 tokens, 2 turns, stop, staleness 3" in text
    assert text.endswith("?\n>>> a☃b ☃?\n")


def test_one_is_told_now_and_then_and_is_short(folder: RunFolder) -> None:
    long = trajectory(list(b"x" * 3 * TOLD_CHARS), list(b"y"), reward=0.5)
    # The clock is read at the start, twice for the first, once for each of two, and for the last.
    clock = iter([0.0, 0.0, 0.0, 1.0, EVERY_S / 2, EVERY_S, EVERY_S])
    rows = logged(folder, 2, [(step, [long]) for step in (1, 2, 3, 4)], clock=clock.__next__)
    assert [row["step"] for row in rows] == [1, 4]
    assert len(rows[0]["prompt"]) == TOLD_CHARS + 1
    (seen,) = heard(("rollout", rows[0])).look(status()).rollouts
    assert (seen.step, seen.response) == (1, "y")


def test_what_is_told_is_printable_and_keeps_its_length() -> None:
    row = {
        "step": 1, "sample": "s", "group": "g", "prompt_id": "p", "reward": 1.0, "tokens": 3,
        "reward_parts": {}, "turns": 1, "seconds": 1.0, "finish_reason": "stop", "staleness": 0,
        "prompt": "\x1b[2J", "response": "a\r\x07b\nc\u202ed",
    }  # fmt: skip
    feed = heard(("rollout", told(row)), ("rollout", {**row, "reward": float("nan")}))
    (seen,) = feed.look(status()).rollouts
    assert (seen.prompt, seen.response) == (" [2J", "a  b\nc d")
    assert feed.invalid == 1


def test_a_model_that_says_what_steers_terminals(folder: RunFolder) -> None:
    logged(folder, 1, [(1, [rewarded(1.0)])])
    row = json.loads(folder.samples.read_text())
    folder.samples.write_text(json.dumps({**row, "response": "\x1b[2Jcleared\nx"}) + "\n")
    done = CliRunner().invoke(command, ["--samples", "4"])
    assert "\x1b" not in done.output
    assert ">>>  [2Jcleared\nx\n" in done.output


def test_branches_of_a_sample_are_one_row(folder: RunFolder) -> None:
    one, two = rewarded(1.0), trajectory(list(b"again"), list(b"other"))
    branch = Branch(**{name: getattr(two, name) for name in Branch.__struct_fields__})
    branched = msgspec.structs.replace(one, branches=[branch])
    logged(folder, 4, [(1, [branched])])
    (row,) = read_rollouts(folder)
    assert (row["branches"], row["tokens"], row["response"]) == (2, 11, "answer")
    assert "11 tokens, 2 branches" in rollout_text(row)
