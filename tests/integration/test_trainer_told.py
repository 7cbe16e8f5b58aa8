"""What the buffer tells the trainer beside the batch that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.test_trainer_loop import (
    World,
    directory,  # noqa: F401 - a fixture
    start,  # noqa: F401 - a fixture
)
from unit.test_sinks import curves

from umbra.proto.records import EvalReport


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
