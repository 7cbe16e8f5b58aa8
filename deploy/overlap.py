"""How much generation and training really ran at the same time, from their spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]  # start and end, seconds


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of the window in which each side, and both at once, were busy."""

    generator_busy: float
    trainer_busy: float
    both_busy: float
    window_s: float


def overlap(
    training: Iterable[Interval],
    generation: Iterable[Interval],
    running: Iterable[Interval],
    window: Interval,
) -> Overlap | None:
    """How busy both sides were in `window`, without the time in which nothing ran.

    Several generators count once: a side is busy while any of its processes is.

    Args:
        training, generation: when the sides did anything but wait.
        running: when any process of the run did anything at all, waiting included. A run that was
            ended and taken up again has a gap in it, which does not count.
        window: from where to where.

    Returns:
        None for a window in which nothing ran.
    """
    window_s = total(clip(merge(running), window))
    if window_s <= 0:
        return None
    trainer = clip(merge(training), window)
    generator = clip(merge(generation), window)
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
    return sum(end - start for start, end in intervals)
