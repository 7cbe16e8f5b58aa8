"""Overlap of spans: a small worked example, and laws that hold for any spans."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.overlap import clip, intersect, merge, overlap, total

spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that `intervals` with whole ends cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def test_worked_example() -> None:
    # Steps at [0, 2), [4, 6), [8, 10): the window is [4, 10). Decoding covers [3, 5) and [7, 9).
    result = overlap([(8, 10), (0, 2), (4, 6)], [(3, 5), (7, 8), (7.5, 9)])
    assert result is not None
    assert result.window_s == 6
    assert result.trainer_busy == pytest.approx(4 / 6)
    assert result.generator_busy == pytest.approx(3 / 6)
    assert result.both_busy == pytest.approx(2 / 6)


@pytest.mark.parametrize("steps", [[], [(0.0, 1.0)], [(1.0, 1.0), (1.0, 1.0)]])
def test_no_steady_state(steps: list[tuple[float, float]]) -> None:
    assert overlap(steps, [(0.0, 1.0)]) is None


@given(spans)
def test_merge_covers_the_same_once(intervals: list[tuple[float, float]]) -> None:
    merged = merge(intervals)
    assert covered(merged) == covered(intervals)
    assert total(merged) == len(covered(intervals))
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@given(spans, spans)
def test_intersect_is_what_both_cover(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    both = intersect(merge(left), merge(right))
    assert covered(both) == covered(left) & covered(right)
    assert total(both) == len(covered(both))


@given(spans)
def test_clip_stays_within_its_window(intervals: list[tuple[float, float]]) -> None:
    assert covered(clip(merge(intervals), (10, 30))) == covered(intervals) & set(range(10, 30))
