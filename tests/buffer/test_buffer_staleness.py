"""The staleness rules against cases worked out by hand."""

from __future__ import annotations

import pytest

from umbra.services.buffer.samples.staleness import StalenessPolicy, split


def policy(run_ahead: int, max_staleness: int, steps: int = 100) -> StalenessPolicy:
    return StalenessPolicy(
        batch_groups=4, run_ahead=run_ahead, max_staleness=max_staleness, steps=steps
    )


def test_the_example_of_the_docstring() -> None:
    rules = StalenessPolicy(batch_groups=2, run_ahead=1, max_staleness=2, steps=100)
    assert rules.room(untrained=0, version=3) == 4
    due = rules.due_version(untrained=2, version=3)  # the third
    assert due == 4
    assert rules.required_version(due, version=3) == 2


@pytest.mark.parametrize(
    ("run_ahead", "version", "room"), [(0, 0, 4), (0, 3, 4), (1, 0, 8), (1, 3, 8), (3, 0, 16)]
)
def test_admission(run_ahead: int, version: int, room: int) -> None:
    assert policy(run_ahead, 2).room(untrained=0, version=version) == room
    assert policy(run_ahead, 2).room(untrained=room, version=version) == 0


def test_admission_ends_with_the_run() -> None:
    rules = policy(run_ahead=3, max_staleness=3, steps=5)
    assert rules.room(untrained=0, version=0) == 16
    assert rules.room(untrained=0, version=3) == 8
    assert rules.room(untrained=0, version=5) == 0


@pytest.mark.parametrize(
    ("run_ahead", "max_staleness", "bound", "typical"),
    [(0, 5, 0, 0), (1, 2, 2, 1), (4, 2, 2, 2), (1, 0, 0, 0)],
)
def test_what_two_knobs_imply(run_ahead: int, max_staleness: int, bound: int, typical: int) -> None:
    rules = policy(run_ahead, max_staleness)
    assert (rules.bound, rules.typical) == (bound, typical)
    assert not rules.is_stale(oldest=7 - bound, version=7)
    assert rules.is_stale(oldest=6 - bound, version=7)


def test_a_sample_that_is_late_needs_weights_for_the_version_it_will_be_trained_at() -> None:
    rules = policy(run_ahead=1, max_staleness=1)
    assert rules.required_version(due=2, version=2) == 1
    assert rules.required_version(due=2, version=4) == 3


@pytest.mark.parametrize(
    ("oldest", "newest", "version", "parts"),
    [
        (5, 5, 5, (0, 0, 0)),
        (3, 5, 5, (2, 2, 0)),
        (3, 3, 5, (2, 0, 2)),
        (3, 4, 5, (2, 1, 1)),
        (3, 7, 5, (2, 2, 0)),  # the trainer went back to a checkpoint, generators are ahead of it
        (6, 7, 5, (-1, -1, 0)),
    ],
)
def test_split(oldest: int, newest: int, version: int, parts: tuple[int, int, int]) -> None:
    assert split(oldest, newest, version) == parts
