"""Figures of all steps, in bounded memory."""

import pytest

from umbra.services.buffer.figures import KEPT, StepCurves
from umbra.services.buffer.samples.staleness import StalenessStats


def test_every_step_is_a_point_at_first() -> None:
    curves = StepCurves()
    curves.add(1, {"loss": 0.5, "of no interest": 1.0, "samples": 8.0}, 10.0)
    curves.add(2, {"loss": 0.25, "reward/mean": 1.0, "samples": 8.0}, 12.0)
    record = curves.record()
    assert record.steps == [1, 2]
    assert record.values == {
        "reward/mean": [None, 1.0], "loss": [0.5, 0.25], "samples_per_s": [None, 4.0],
    }  # fmt: skip


@pytest.mark.parametrize("steps", [KEPT, KEPT + 1, 10 * KEPT, 10_001])
def test_long_runs_are_condensed_to_means(steps: int) -> None:
    curves = StepCurves()
    for step in range(1, steps + 1):
        curves.add(step, {"loss": float(step)}, float(step))
    record = curves.record()
    assert len(record.steps) <= KEPT
    assert record.steps[-1] == steps
    losses = record.values["loss"]
    first = record.steps[0]
    assert losses[0] == pytest.approx((1 + first) / 2)
    assert losses == sorted(loss for loss in losses if loss is not None)


def test_steps_that_are_done_once_more_count_once() -> None:
    curves = StepCurves()
    for step in range(1, 6):
        curves.add(step, {"loss": 1.0}, 0.0)
    curves.cut(3)
    curves.add(3, {"loss": 2.0}, 0.0)
    assert curves.record().steps == [1, 2, 3]
    assert curves.record().values["loss"] == [1.0, 1.0, 2.0]


def test_the_histogram_of_staleness_adds_up() -> None:
    one, two = StalenessStats(), StalenessStats()
    one.add(oldest=4, newest=5, version=5)
    one.add(oldest=5, newest=5, version=5)
    two.add(oldest=2, newest=5, version=5)
    one.merge(two)
    assert one.counts == [1, 1, 0, 1]
    assert sum(one.counts) == one.samples
    one.remove(two)
    assert one.counts == [1, 1, 0, 0]
