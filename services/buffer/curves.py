"""Figures of all steps of a run in bounded memory, for those who watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from umbra.proto.messages import Curves

KEPT = 256  # stretches at most; then two and two become one
SHOWN = (
    "reward/mean", "loss", "staleness/total/mean", "response_length/mean", "entropy", "grad_norm",
    "mismatch/k3", "ess",
)  # fmt: skip


@dataclass(slots=True)
class _Stretch:
    """Some steps in a row."""

    first: int
    last: int
    sums: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.last = step
        for name in SHOWN:
            if name in values:
                self.sums[name] = self.sums.get(name, 0.0) + values[name]
                self.counts[name] = self.counts.get(name, 0) + 1

    def join(self, later: _Stretch) -> None:
        self.last = later.last
        for name, value in later.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + later.counts[name]

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if name in self.counts else None


class StepCurves:
    """Means of what the trainer reports, over stretches of steps that get longer with the run."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._length = 1

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of `step`, the newest."""
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.last - last.first + 1 >= self._length:
            last = _Stretch(step, step)
            self._stretches.append(last)
        last.add(step, values)
        if len(self._stretches) > KEPT:
            self._length *= 2
            pairs = zip(self._stretches[0::2], self._stretches[1::2], strict=False)
            odd = self._stretches[-1:] if len(self._stretches) % 2 else []
            joined: list[_Stretch] = []
            for one, two in pairs:
                one.join(two)
                joined.append(one)
            self._stretches = joined + odd

    def cut(self, step: int) -> None:
        """The trainer does `step` and what follows once more."""
        self._stretches = [stretch for stretch in self._stretches if stretch.last < step]

    def record(self) -> Curves:
        """What watchers are told."""
        stretches = self._stretches
        values = {name: [stretch.mean(name) for stretch in stretches] for name in SHOWN}
        return Curves(
            steps=[stretch.last for stretch in stretches],
            values={
                name: line for name, line in values.items() if any(v is not None for v in line)
            },
        )
