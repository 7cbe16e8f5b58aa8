"""How fast counts go up, as of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from umbra.proto.messages import Rates

WINDOW_S = 10.0
RESOLUTION_S = 0.5  # changes that are closer are one
LEAST_S = 1.0  # of less than a second nothing can be said


class Meter:
    """The rate of one running count: from a change at least `WINDOW_S` ago to the newest one.

    So it is exact for what comes in bursts (a batch a minute) and not zero between two of them; it
    falls once the next burst is overdue. Before there are two changes it is counted from when work
    began.
    """

    def __init__(self, total: int, now: float) -> None:
        self._marks: deque[tuple[float, int]] = deque([(now, total)])

    def see(self, total: int, now: float) -> None:
        """The count is at `total`; one that has gone down begins anew."""
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
        """Per second."""
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_at - first_at, now - last_at, LEAST_S)


class Throughput:
    """`Status.rates`: what goes on per second, of counts that the broker keeps anyway.

    Args:
        counts: the running counts, by the names of the fields of `Rates`; called at every `see`.
        now: the time, seconds.
    """

    def __init__(self, counts: Callable[[], dict[str, int]], now: float) -> None:
        self._counts = counts
        self._meters: dict[str, Meter] = {}
        self._working = False
        self.see(now)

    def see(self, now: float) -> None:
        """Look at the counts; time before the first sample is issued does not count."""
        counts = self._counts()
        if not self._working:
            self._working = counts["issued_per_s"] > 0
            if not self._working or not self._meters:
                self._meters = {name: Meter(count, now) for name, count in counts.items()}
        for name, count in counts.items():
            self._meters[name].see(count, now)

    def rates(self, now: float) -> Rates:
        """As of now."""
        self.see(now)
        return Rates(**{name: meter.rate(now) for name, meter in self._meters.items()})
