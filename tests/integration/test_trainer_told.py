"""What the buffer tells the trainer beside the batch that it asks for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.policy_rollouts import rollouts
from fakes.slowness import seconds
from integration.test_trainer_loop import (
    World,
    directory,  # noqa: F401 - a fixture
    rows,
    start,  # noqa: F401 - a fixture
)
from unit.test_sinks import curves

from umbra.proto.errors import DeadlineError, RejectedError
from umbra.proto.messages import (
    BatchLease,
    CommitBatch,
    LeaseBatch,
    Message,
    Ok,
    PeekBatch,
    RejectSamples,
)
from umbra.proto.records import EvalReport, Sampling, pack_float32, pack_int32
from umbra.services.config.trajectory_rules import MOST_VOCABULARY
from umbra.services.trainer.batch import BatchError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluations_reach_the_curves(directory: Path, start: Any, tmp_path: Path) -> None:  # noqa: F811
    """One was told with each batch, the last one with the end of the run."""
    world = World(directory)
    world.evals = [
        EvalReport(version=version, done=True, samples=8, accuracy=0.25 * version)
        for version in range(3)
    ]
    assert start(world, **{"metrics.tensorboard": "true"}) == 0
    found = curves(tmp_path / "tensorboard")
    assert found["eval/accuracy"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [step for step, _ in found["reward/mean"]] == [1, 2]


class Ahead(World):
    """Its buffer shows the next batch in advance, and hands out that one or another."""

    def __init__(self, model: Path, *, keeps: bool = True, refuses: bool = False) -> None:
        super().__init__(model)
        self.keeps = keeps
        self.refuses = refuses
        self.shown = threading.Event()
        self.leases: list[LeaseBatch] = []

    def call(
        self,
        body: Message,
        reply: type[Message],
        *,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> Message:
        if isinstance(body, PeekBatch):
            assert threading.current_thread() is not threading.main_thread()
            if self.refuses:
                raise RejectedError("no such message", code="unexpected")
            made = rollouts(self.model, body.step - 2, seed=body.step)
            self.shown.set()
            return BatchLease(step=body.step, trajectories=made, digest=f"of {body.step}")
        if isinstance(body, CommitBatch) and not self.refuses:
            assert self.shown.wait(seconds(30))  # else it would depend on which is faster
        if isinstance(body, LeaseBatch):
            self.leases.append(body)
            if body.held and self.keeps:
                return BatchLease(step=body.step, trajectories=[], same=True)
        return super().call(body, reply, timeout_s=timeout_s, stopping=stopping)


@pytest.mark.parametrize(
    ("world", "prefetched", "staleness"),
    [({}, [0, 1], [0, 1]), ({"keeps": False}, [0, 0], [0, 0]), ({"refuses": True}, [0, 0], [0, 0])],
)
def test_the_next_batch_comes_while_this_one_is_trained_on(
    directory: Path,  # noqa: F811
    start: Any,  # noqa: F811
    tmp_path: Path,
    world: dict[str, bool],
    prefetched: list[int],
    staleness: list[int],
) -> None:
    """The one that was seen, if the buffer says that it is the one; otherwise what it sends."""
    run = Ahead(directory, **world)
    assert start(run) == 0
    assert run.committed() == [1, 2]
    steps = rows(tmp_path, "step")
    assert [row["prefetched"] for row in steps] == prefetched
    assert [row["staleness/total/max"] for row in steps] == staleness
    expected = "" if run.refuses else "of 2"
    assert {ask.held for ask in run.leases if ask.step == 2} == {expected}
    assert {ask.held for ask in run.leases if ask.step == 1} == {""}


class NeverFull(Ahead):
    """Its next batch is never full in advance."""

    def call(
        self,
        body: Message,
        reply: type[Message],
        *,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> Message:
        if isinstance(body, PeekBatch):
            self.shown.set()
            assert stopping is not None and stopping.wait(seconds(30)), "it is told that it may end"
            raise DeadlineError("stopped while waiting for the buffer")
        return super().call(body, reply, timeout_s=timeout_s, stopping=stopping)


@pytest.mark.parametrize("stop_at", [None, "training step 2"])
def test_a_batch_that_is_not_there_yet_is_asked_for_in_its_turn(
    directory: Path,  # noqa: F811
    start: Any,  # noqa: F811
    tmp_path: Path,
    stop_at: str | None,
) -> None:
    run = NeverFull(directory)
    run.stop_at = stop_at
    assert start(run) == 0
    assert run.committed() == ([1] if stop_at else [1, 2])
    assert not any(row["prefetched"] for row in rows(tmp_path, "step"))


class Broken(World):
    """The second batch has a sample that is not sound; all have been through the stage `logp`.

    A sample that is rejected is replaced, if it `mends`.
    """

    def __init__(self, model: Path, *, mends: bool = True, **changes: Any) -> None:
        super().__init__(model)
        self.changes = changes
        self.mends = mends
        self.rejected: list[RejectSamples] = []
        self.vocabularies: set[int] = set()

    def call(
        self,
        body: Message,
        reply: type[Message],
        *,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> Message:
        if isinstance(body, RejectSamples):
            self.rejected.append(body)
            self.changes = {} if self.mends else self.changes
            return Ok()
        if isinstance(body, LeaseBatch):
            self.vocabularies.add(body.vocabulary)
        answer = super().call(body, reply, timeout_s=timeout_s, stopping=stopping)
        if isinstance(answer, BatchLease) and answer.trajectories:
            made = [
                msgspec.structs.replace(one, proximal_logprobs=one.logprobs)
                for one in answer.trajectories
            ]
            if answer.step == 2:
                made[3] = msgspec.structs.replace(made[3], **self.changes)
            answer = msgspec.structs.replace(answer, trajectories=made)
        return answer


STAGED = {
    "objective": "decoupled",
    "proximal": "stage",
    "buffer.stages": '["logp"]',
    "checkpoint.every": 1,
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"logprobs": pack_float32([-1.0])}, "logprobs has 4 bytes for"),
        ({"loss_mask": b""}, "loss_mask has 0 entries"),
        ({"proximal_logprobs": b"1234"}, "proximal_logprobs has 4 bytes"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature 0"),
        ({"prompt_ids": pack_int32([2**31 - 1])}, "reach from 2147483647"),
        ({"reward": 1e308}, "reward is 1e+308"),
    ],
)
def test_what_is_not_sound_is_given_back_and_training_goes_on(
    directory: Path,  # noqa: F811
    start: Any,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    told: str,
) -> None:
    world = Broken(directory, **changes)
    assert start(world, **STAGED) == 0
    assert world.committed() == [1, 2]
    (rejected,) = world.rejected
    (fault,) = rejected.faults.values()
    assert rejected.step == 2 and told in fault
    (row,) = rows(tmp_path, "rejected")
    assert row["step"] == 2 and row["samples"] == rejected.faults
    (vocabulary,) = world.vocabularies
    assert 0 < vocabulary < MOST_VOCABULARY, "the buffer is told of the model"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward": 1e308}, "sample .*: reward is 1e"),
        ({"proximal_logprobs": None}, "sample .* has no proximal_logprobs, .* buffer.stages"),
    ],
)
def test_a_buffer_that_has_nothing_sound_leaves_the_checkpoint_before_it(
    directory: Path,  # noqa: F811
    start: Any,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    told: str,
) -> None:
    """1. A sound batch, then none that is. 2. Another trainer, whose data are sound."""
    world = Broken(directory, mends=False, **changes)
    with pytest.raises(BatchError, match=told) as failure:
        start(world, **STAGED)
    assert failure.value.exit_code == 6 and "\n" not in str(failure.value)
    assert world.committed() == [1]
    assert not (tmp_path / "model").exists()
    sound = Broken(directory)
    assert start(sound, **STAGED) == 0
    assert sound.committed() == [2], "it goes on from the checkpoint of step 1"
