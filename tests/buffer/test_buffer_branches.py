"""Samples with branches in the buffer: one lease, one answer, one count, and every line judged."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.broker_world import trajectory, world

from umbra.proto.bounds import BRANCHES
from umbra.proto.messages import SubmitResults, TaskLeases
from umbra.proto.records import (
    Branch,
    Score,
    Task,
    Trajectory,
    VersionSpan,
    array_bytes,
    pack_float32,
    pack_int32,
    unpack_float32,
)
from umbra.services.buffer.samples.trajectories import MORE_BYTES, pack, size_fault
from umbra.services.config import TrainerConfig
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.generator.line import line_of
from umbra.services.modeling.models import load_model
from umbra.services.scorer.logprobs import LogprobWorker


def branch(version: int = 0, tokens: int = 3, **changes: Any) -> Branch:
    values: dict[str, Any] = {
        "prompt_ids": pack_int32([5]),
        "response_ids": pack_int32([6] * tokens),
        "loss_mask": b"\1" * tokens,
        "logprobs": pack_float32([-0.25] * tokens),
        "spans": [VersionSpan(version=version, start=0, end=tokens)],
    }
    return Branch(**{**values, **changes})


def branched(task: Task, *versions: int, **changes: Any) -> Trajectory:
    """An answer whose lines are of these versions."""
    first, *further = versions
    return trajectory(task, first, branches=[branch(one) for one in further], **changes)


def test_a_sample_counts_once_however_many_branches_it_has() -> None:
    made = world(durable=True)
    tasks = made.lease("a", 4, 0)
    answers = [branched(task, *[0] * (1 + n)) for n, task in enumerate(tasks)]
    assert not made.submit("a", *answers).refused
    assert not made.submit("a", answers[3]).refused, "an answer that comes again"
    assert made.broker.counters["accepted"] == 4
    made.restart_broker()
    made.join("trainer", "trainer")
    batch = made.batch(1)
    assert batch.trajectories == answers, "to the byte"
    made.commit(1)
    assert made.pool.ledger.trained == 4


@pytest.mark.parametrize("old", [0, 1])
def test_a_stale_token_of_any_branch_makes_the_sample_stale(old: int) -> None:
    made = world(max_staleness=1, run_ahead=1)
    late = made.lease("b", 2, 0)
    for step in (1, 2, 3):
        made.produce("a", step - 1, 4)
        made.train(step)
    versions = [3, 3, 3]
    versions[old] = 0
    for task in late:
        made.submit("b", branched(task, *versions))
    assert made.broker.counters["stale_answers"] >= 1
    assert made.pool.ledger.snapshot().ended == {"stale": 2}, "the group of both"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": pack_float32([-0.25])}, "branch 2 of 2: logprobs has 4 bytes"),
        ({"loss_mask": b"\0\0\0"}, "branch 2 of 2: loss_mask has no token"),
        ({"spans": [VersionSpan(version=9, start=0, end=3)]}, "branch 2 of 2: span of version 9"),
        ({"prompt_ids": b""}, "branch 2 of 2: no prompt tokens"),
        ({"response_ids": pack_int32([6, -1, 6])}, "branch 2 of 2: response_ids reach from -1"),
    ],
)
def test_each_branch_is_judged(changes: dict[str, Any], words: str) -> None:
    made = world()
    task = made.lease("a", 1, 0)[0]
    refused = made.submit("a", trajectory(task, 0, branches=[branch(**changes)])).refused
    assert words in refused[task.sample_id]
    assert made.broker.counters["malformed_trajectory"] == 1


def test_what_belongs_to_one_line_alone_is_refused() -> None:
    task = world().lease("a", 1, 0)[0]
    sound = branched(task, 0, 0)
    assert find_fault(sound, RunFacts()) is None
    for name in ("ref_logprobs", "proximal_logprobs"):
        for tokens in (5, 2):
            made = msgspec.structs.replace(sound, **{name: pack_float32([-0.5] * tokens)})
            fault = find_fault(made, RunFacts())
            assert fault is None if tokens == 5 else "do not fit 2 branches" in (fault or "")


def test_a_partial_is_one_line() -> None:
    made = world()
    task = made.lease("a", 1, 0)[0]
    partial = branched(task, 0, 0, finish_reason="partial")
    made.back("a", task, partial=partial)
    assert made.broker.counters["malformed_partial"] == 1
    assert made.lease("b", 1, 0)[0].trajectory is None, "it restarts"
    assert line_of(partial, partial.sampling) is None


def test_as_many_branches_as_there_may_be_fit() -> None:
    task = world().lease("a", 1, 0)[0]
    spans = [VersionSpan(version=n, start=n, end=n + 1) for n in range(128)]
    most = branch(tokens=128, spans=spans)
    made = trajectory(task, 0, branches=[most] * (BRANCHES - 1))
    assert array_bytes(made) == 8 + 8 + 2 + 8 + (BRANCHES - 1) * (4 + 128 * 9)
    assert size_fault(pack(made), array_bytes(made), len(made.branches)) is None
    assert size_fault(b"x" * (8 + MORE_BYTES), 8) is None
    assert size_fault(b"x" * (9 + MORE_BYTES), 8) == (
        f"it has {9 + MORE_BYTES} bytes, far more than its arrays (8)"
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            msgspec.to_builtins(msgspec.structs.replace(made, branches=[most] * BRANCHES)),
            Trajectory,
        )


def test_scorers_find_logprobs_of_every_line(tiny_model_dir: Path) -> None:
    """Scenario: two lines, scored together and each alone. Result: the same numbers."""
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    task = run.lease("a", 1, 0)[0]
    further = branch(loss_mask=b"\1\0\1", logprobs=pack_float32([-0.5, 0, -0.5]))
    run.submit("a", trajectory(task, 0, branches=[further]))
    (scoring,) = run.to_score("r", "ref_logp", 1)
    model = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    worker = LogprobWorker(model, TrainerConfig())

    def score(made: Trajectory) -> Score:
        told: Task = msgspec.structs.replace(scoring, trajectory=made)
        ((found,),) = worker.score([told], lambda: None)
        return found

    together = score(scoring.made)
    alone = [unpack_float32(score(line).logprobs or b"") for line in scoring.made.lines]
    found = unpack_float32(together.logprobs or b"")
    assert found == pytest.approx(alone[0] + alone[1], abs=1e-6)
    assert alone[1][1] == 0 != alone[1][2]
    ack = run.get("r", SubmitResults(scores=[together]), TaskLeases)
    assert not ack.refused
    assert run.pool.samples[task.sample_id].state.value == "ready"
