"""Figures of a run in bounded memory: curves over all steps, recent rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from umbra.proto.messages import Curves, Rates

KEPT = 256  # stretches at most; then two and two become one
SHOWN = (
    "reward/mean", "solved", "samples_per_s", "loss", "staleness/total/mean", "staleness/total/max",
    "response_length/mean", "response_length/p99", "truncated", "entropy", "grad_norm", "ess",
    "mismatch/k3",
)  # fmt: skip


@dataclass(slots=True)
class _Stretch:
    """The reported values of consecutive steps."""

    first: int
    last: int
    sums: dict[str, tuple[float, int]]  # and counts, by name

    def join(self, later: _Stretch) -> None:
        self.last = later.last
        for name, (value, count) in later.sums.items():
            before, counted = self.sums.get(name, (0.0, 0))
            self.sums[name] = before + value, counted + count

    def mean(self, name: str) -> float | None:
        value, count = self.sums.get(name, (0.0, 0))
        return value / count if count else None


class StepCurves:
    """Means of what the trainer reports, over stretches of steps that get longer with the run."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._length = 1
        self._last_at: float | None = None

    def add(self, step: int, values: Mapping[str, float], now: float) -> None:
        if self._last_at is not None and (took := now - self._last_at) > 0:
            values = {**values, "samples_per_s": values.get("samples", 0.0) / took}
        self._last_at = now
        own = _Stretch(step, step, {n: (values[n], 1) for n in SHOWN if n in values})
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.last - last.first + 1 < self._length:
            last.join(own)
            return
        self._stretches.append(own)
        if len(self._stretches) > KEPT:
            self._length *= 2
            for one, two in zip(self._stretches[0::2], self._stretches[1::2], strict=False):
                one.join(two)
            self._stretches = self._stretches[0::2]

    def cut(self, step: int) -> None:
        """Forget `step` and what follows, which the trainer repeats."""
        self._stretches = [stretch for stretch in self._stretches if stretch.last < step]

    def record(self) -> Curves:
        values = {name: [one.mean(name) for one in self._stretches] for name in SHOWN}
        known = {name: line for name, line in values.items() if any(v is not None for v in line)}
        return Curves(steps=[stretch.last for stretch in self._stretches], values=known)


WINDOW_S = 10.0
RESOLUTION_S = 0.5  # changes that are closer are one
LEAST_S = 1.0  # of less than a second nothing can be said


class Meter:
    """The recent rate of a count: from a change at least `WINDOW_S` ago to the newest one.

    So it is exact for what comes in bursts (a batch a minute) and not zero between two of them; it
    falls once the next burst is overdue.
    """

    def __init__(self, total: int, now: float) -> None:
        self._marks: deque[tuple[float, int]] = deque([(now, total)])

    def see(self, total: int, now: float) -> None:
        """Set the count; one that has gone down restarts the measurement."""
        newest = self._marks[-1]
        if total == newest[1]:
            return
        if total < newest[1]:
            self._marks = deque([(now, total)])
            return
        if len(self._marks) > 2 and now - self._marks[-2][0] < RESOLUTION_S:
            self._marks.pop()
        self._marks.append((now, total))
        while len(self._marks) > 2 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()

    def rate(self, now: float) -> float:
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_at - first_at, now - last_at, LEAST_S)


class Throughput:
    def __init__(self, counts: Callable[[], dict[str, int]], now: float) -> None:
        self._counts = counts
        self._meters: dict[str, Meter] = {}
        self._working, self._before = False, counts()["issued_per_s"]  # a resumed run has some
        self.see(now)

    def see(self, now: float) -> None:
        """Read the counts; time before a sample is issued does not count."""
        counts = self._counts()
        if not self._working:
            self._working = counts["issued_per_s"] > self._before
            if not self._working or not self._meters:
                self._meters = {name: Meter(count, now) for name, count in counts.items()}
        for name, count in counts.items():
            self._meters[name].see(count, now)

    def rates(self, now: float) -> Rates:
        self.see(now)
        return Rates(**{name: meter.rate(now) for name, meter in self._meters.items()})
