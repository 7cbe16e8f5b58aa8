"""What a report shows of a run, gathered in two passes over its rows and in bounded memory."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from umbra.deploy.report.recording import Recording, ReportSpan

BINS = 120  # of the time, for the utilisation
SLOWEST = 15
SAMPLES = 6
EXCERPT_S = 3.0  # of the timeline, from the middle of the run

Row = dict[str, Any]


@dataclass
class Utilisation:
    """Seconds that one service spent on each activity, in all and by `BINS` of the run's time."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bins: defaultdict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0] * BINS)
    )

    def add(self, span: ReportSpan, begin: float, width: float) -> None:
        """`span` happened, in a run that began at `begin`, whose bins are `width` s wide."""
        spent = max(0.0, span.end - span.start)
        self.seconds[span.name] = self.seconds.get(span.name, 0.0) + spent
        first = int((span.start - begin) / width)
        last = int((span.end - begin) / width)
        for index in range(max(0, first), min(BINS - 1, last) + 1):
            left, right = begin + index * width, begin + (index + 1) * width
            self.bins[span.name][index] += max(0.0, min(span.end, right) - max(span.start, left))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Figures:
    """The figures of one run; times are by the buffer's clock."""

    begin: float
    end: float
    steps: list[Row] = field(default_factory=list[Row])
    pushes: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])  # by receiver
    evals: list[Row] = field(default_factory=list[Row])
    warnings: list[Row] = field(default_factory=list[Row])  # as they were first raised
    utilisation: dict[str, Utilisation] = field(default_factory=dict[str, Utilisation])
    excerpt: list[ReportSpan] = field(default_factory=list[ReportSpan])
    slowest: list[Row] = field(default_factory=list[Row])
    samples: deque[Row] = field(default_factory=lambda: deque[Row](maxlen=SAMPLES))

    @property
    def seconds(self) -> float:
        """From the first thing that happened to the last."""
        return max(self.end - self.begin, 1e-9)

    @property
    def excerpt_from(self) -> float:
        """Where the excerpt of the timeline begins."""
        return self.begin + max(0.0, self.seconds - EXCERPT_S) / 2


def gather(recording: Recording) -> Figures:
    figures = Figures(*_range(recording))
    width = figures.seconds / BINS
    steps: dict[int, Row] = {}
    slow: list[tuple[float, str, Row]] = []
    for row in recording.rows():
        match row["kind"]:
            case "step":  # a trainer that started again has repeated some: the last one counts
                steps[row["step"]] = row
            case "push":
                figures.pushes.setdefault(row["receiver"], []).append(row)
            case "eval":
                figures.evals.append(row)
            case "warning":
                figures.warnings.append(row)
            case "sample":
                figures.samples.append(row)
            case "slow_sample":
                heapq.heappush(slow, (row["seconds"], row["sample"], row))
                if len(slow) > SLOWEST:
                    heapq.heappop(slow)
            case _:
                pass
        for span in recording.spans(row):
            _add(figures, span, width)
    figures.steps = [steps[number] for number in sorted(steps)]
    figures.slowest = [row for _, _, row in sorted(slow, key=lambda item: -item[0])]
    return figures


def _add(figures: Figures, span: ReportSpan, width: float) -> None:
    if not span.track:
        known = figures.utilisation.setdefault(span.service, Utilisation())
        known.add(span, figures.begin, width)
    since = figures.excerpt_from
    if span.end > since and span.start < since + EXCERPT_S:
        figures.excerpt.append(span)


def _range(recording: Recording) -> tuple[float, float]:
    begin, end = float("inf"), float("-inf")
    for span in _spans(recording):
        begin, end = min(begin, span.start), max(end, span.end)
    return (begin, end) if end >= begin else (0.0, 0.0)


def _spans(recording: Recording) -> Iterable[ReportSpan]:
    for row in recording.rows():
        yield from recording.spans(row)
