"""The lease queue: who works on which sample, until when.

A sample has at most one lease, to a generator or to a scorer, as its state says. A lease is named
by `(sample_id, attempt)`: each sort of lease counts its attempts, so that results under an older
one are told apart. Times are seconds of the broker's clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from umbra.proto.access import LEASE_BYTES
from umbra.proto.records import Task
from umbra.services.buffer.samples.groups import Sample

FILL_BYTES = LEASE_BYTES // 4  # of a reply: the last row and trajectory in it come on top
SLACK = 1024  # outdated deadlines that are no matter


@dataclass(slots=True)
class Grant:
    """Tasks of one reply, leased to `holder`: at most `capacity`, of about `FILL_BYTES`."""

    holder: str
    request: int  # its id, by which it is answered again if the reply is lost
    capacity: int
    now: float
    version: int = 0  # that a generator serves
    tasks: list[Task] = field(default_factory=list[Task])
    filled: int = 0  # bytes of rows and trajectories

    @property
    def room(self) -> int:
        return self.capacity - len(self.tasks) if self.filled < FILL_BYTES else 0


class LeaseTable:
    """All leases, by holder and deadline; one not renewed expires after `lease_s` seconds."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.held: dict[str, dict[str, Sample]] = {}  # by holder
        self._count = 0
        self._pushed = 0  # breaks ties of deadlines
        # (deadline, tie, number of all leases of the sample up to this one, sample); a renewed
        # lease is pushed again when its old deadline is reached.
        self._heap: list[tuple[float, int, int, Sample]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, sample: Sample, holder: str, now: float) -> None:
        """Lease `sample`, whose state and attempt are set, to `holder`."""
        sample.holder = holder
        sample.leased_at = now
        sample.deadline = now + self.lease_s
        held = self.held.get(holder)
        if held is None:
            held = self.held[holder] = {}
        held[sample.sample_id] = sample
        self._count += 1
        self._push(sample)
        if len(self._heap) > 2 * self._count + SLACK:  # deadlines are far, and answers come fast
            self._heap = [entry for entry in self._heap if _is_open(entry[3], entry[2])]
            heapq.heapify(self._heap)

    def find(self, sample_id: str, attempt: int, holder: str) -> Sample | None:
        held = self.held.get(holder)
        sample = held.get(sample_id) if held else None
        return sample if sample is not None and sample.lease_attempt == attempt else None

    def of(self, holder: str) -> list[Sample]:
        return list(self.held.get(holder, {}).values())

    def all(self) -> list[Sample]:
        return [sample for held in self.held.values() for sample in held.values()]

    def renew(self, sample: Sample, now: float) -> None:
        sample.deadline = now + self.lease_s

    def release(self, sample: Sample) -> None:
        if sample.holder:
            held = self.held[sample.holder]
            del held[sample.sample_id]
            if not held:
                del self.held[sample.holder]
            sample.holder = ""
            self._count -= 1

    def expired(self, now: float) -> Iterator[Sample]:
        """Yield samples of expired leases; the caller releases each before asking for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, number, sample = heapq.heappop(self._heap)
            if not _is_open(sample, number):
                continue
            if sample.deadline > now:  # renewed meanwhile
                self._push(sample)
            else:
                yield sample

    def _push(self, sample: Sample) -> None:
        self._pushed += 1
        number = sample.attempt + sample.score_attempts
        heapq.heappush(self._heap, (sample.deadline, self._pushed, number, sample))


def _is_open(sample: Sample, number: int) -> bool:
    return bool(sample.holder) and sample.attempt + sample.score_attempts == number
