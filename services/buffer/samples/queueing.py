"""Which sample is leased next, and whose lease is over: two heaps.

Every operation costs O(log n) on average: outdated entries are skipped when they come up, or
dropped together once they are most.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from umbra.services.buffer.samples.groups import Sample, State

SLACK = 1024  # outdated deadlines that are no matter


class Queue:
    """Queued samples, the first issued first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sample]] = []

    def add(self, sample: Sample) -> None:
        """`sample` is queued now."""
        heapq.heappush(self._heap, (sample.serial, sample))

    def first(self) -> Sample | None:
        """The one that is next, left where it is."""
        while self._heap:
            sample = self._heap[0][1]
            if sample.state is State.QUEUED:
                return sample
            heapq.heappop(self._heap)
        return None

    def take(self, sample: Sample) -> None:
        """Take away `sample`, the first."""
        entry = heapq.heappop(self._heap)
        assert entry[1] is sample


class Deadlines:
    """Ends of leases. A lease that is renewed stays where it is until its old deadline comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Sample]] = []  # serial, attempt: ties

    def add(self, sample: Sample, leases: int) -> None:
        """`sample` was leased; `leases` are out in all."""
        heapq.heappush(self._heap, (sample.deadline, sample.serial, sample.attempt, sample))
        if len(self._heap) > 2 * leases + SLACK:  # a deadline may be far, and answers come fast
            self._heap = [entry for entry in self._heap if _is_open(entry[3], entry[2])]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> Iterator[Sample]:
        """Samples whose lease is over; the caller takes each back before it asks for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, serial, attempt, sample = heapq.heappop(self._heap)
            if not _is_open(sample, attempt):
                continue
            if sample.deadline > now:  # renewed meanwhile
                heapq.heappush(self._heap, (sample.deadline, serial, attempt, sample))
            else:
                yield sample


def _is_open(sample: Sample, attempt: int) -> bool:
    return sample.state is State.GENERATING and sample.attempt == attempt
