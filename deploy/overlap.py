"""How much generation and training really ran at the same time, from their spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]  # start and end, seconds


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of the window in which each side, and both at once, were at work."""

    generator_busy: float
    trainer_busy: float
    both_busy: float
    window_s: float


def overlap(train_steps: Sequence[Interval], decodes: Iterable[Interval]) -> Overlap | None:
    """The overlap in the steady state: second train step's start to the last one's end.

    The first step is left out because generation had nothing to overlap with before it. Decodes of
    several generators count once: a side is at work while any of its processes is. None with fewer
    than two steps.
    """
    if len(train_steps) < 2:
        return None
    starts = sorted(start for start, _ in train_steps)
    window = (starts[1], max(end for _, end in train_steps))
    window_s = window[1] - window[0]
    if window_s <= 0:
        return None
    trainer = clip(merge(train_steps), window)
    generator = clip(merge(decodes), window)
    return Overlap(
        generator_busy=total(generator) / window_s,
        trainer_busy=total(trainer) / window_s,
        both_busy=total(intersect(generator, trainer)) / window_s,
        window_s=window_s,
    )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of `intervals` lies within `window`."""
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in clipped if end > start]


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Where two lists of disjoint, ordered intervals both are."""
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if end > start:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def total(intervals: Iterable[Interval]) -> float:
    """Their summed length."""
    return sum(end - start for start, end in intervals)
