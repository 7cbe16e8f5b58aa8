"""Messages from the buffer to the trainer beside the batches."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from integration.test_trainer_loop import (
    World,
    start,  # noqa: F401 - a fixture
)
from trainer.test_sinks import curves

from umbra.proto.messages import BatchLease, Message
from umbra.proto.records import EvalReport
from umbra.services.trainer.batch import BatchError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluations_reach_the_curves(directory: Path, start: Any, tmp_path: Path) -> None:  # noqa: F811
    """One was told with each batch, the last one with the end of the run."""
    world = World(directory)
    world.evals = [
        EvalReport(version=version, done=True, samples=8, accuracy=0.25 * version)
        for version in range(3)
    ]
    assert start(world, **{"metrics.also": '["tensorboard"]'}) == 0
    found = curves(tmp_path / "tensorboard")
    assert found["eval/accuracy"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [step for step, _ in found["reward/mean"]] == [1, 2]


class Broken(World):
    """The second batch has a sample that is not sound; all have been through the stage `logp`."""

    def __init__(self, model: Path, **changes: Any) -> None:
        super().__init__(model)
        self.changes = changes

    def call(
        self,
        body: Message,
        reply: type[Message],
        *,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> Message:
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
        ({"reward": 1e308}, "sample .*: reward is 1e"),
        ({"proximal_logprobs": None}, "sample .* has no proximal_logprobs, .* buffer.stages"),
    ],
)
def test_a_buffer_that_has_nothing_sound_leaves_the_checkpoint_before_it(
    directory: Path,
    start: Any,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    told: str,
) -> None:
    """1. A sound batch, then none that is. 2. Another trainer, whose data are sound."""
    world = Broken(directory, **changes)
    with pytest.raises(BatchError, match=told) as failure:
        start(world, **STAGED)
    assert failure.value.exit_code == 6 and "\n" not in str(failure.value)
    assert world.committed() == [1]
    assert not (tmp_path / "model").exists()
    sound = Broken(directory)
    assert start(sound, **STAGED) == 0
    assert sound.committed() == [2], "it goes on from the checkpoint of step 1"
