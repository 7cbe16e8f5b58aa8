"""Overlap of spans: a small worked example, and laws that hold for any spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.report.summary import overlap

spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that `intervals` with whole ends cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def test_time_in_which_nothing_ran_does_not_count() -> None:
    """The run was ended after 4 s and taken up again a day later."""
    day = 86_400.0
    work = [(0.0, 4.0), (day, day + 4.0)]
    result = overlap([(2.0, 4.0), (day + 2.0, day + 4.0)], work, work, (0.0, day + 4.0))
    assert result is not None
    assert (result.window_s, result.generator_busy, result.trainer_busy) == (8.0, 1.0, 0.5)


@given(spans, spans)
def test_it_is_the_time_that_is_covered(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    window = set(range(10, 30))
    generating, training = covered(left) & window, covered(right) & window
    running = generating | training
    result = overlap(right, left, [*left, *right], (10, 30))
    if not running:
        assert result is None
        return
    assert result is not None
    assert result.window_s == len(running)
    assert result.generator_busy * result.window_s == pytest.approx(len(generating))
    assert result.trainer_busy * result.window_s == pytest.approx(len(training))
    assert result.both_busy * result.window_s == pytest.approx(len(generating & training))
