"""The lease queue: who works on which sample, until when.

A sample has at most one lease, to a generator or to a scorer, as its state says. A lease is named
by `(sample_id, attempt)`: each sort of lease counts its attempts, so that results under an older
one are told apart. Times are seconds of the broker's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from umbra.proto.access import LEASE_BYTES
from umbra.proto.records import Task
from umbra.services.buffer.samples.groups import Sample

FILL_BYTES = LEASE_BYTES // 4  # of a reply: the last row and trajectory in it come on top


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
        # All take equally long: the order in which they were made or renewed is that of the ends.
        self._deadlines: OrderedDict[Sample, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, sample: Sample, holder: str, now: float) -> None:
        """Lease `sample`, whose state and attempt are set, to `holder`."""
        sample.holder = holder
        sample.leased_at = now
        self.held.setdefault(holder, {})[sample.sample_id] = sample
        self._deadlines[sample] = now + self.lease_s

    def find(self, sample_id: str, attempt: int, holder: str) -> Sample | None:
        held = self.held.get(holder)
        sample = held.get(sample_id) if held else None
        return sample if sample is not None and sample.lease_attempt == attempt else None

    def of(self, holder: str) -> list[Sample]:
        return list(self.held.get(holder, {}).values())

    def all(self) -> list[Sample]:
        return list(self._deadlines)

    def renew(self, sample: Sample, now: float) -> None:
        self._deadlines[sample] = now + self.lease_s
        self._deadlines.move_to_end(sample)

    def release(self, sample: Sample) -> None:
        if sample.holder:
            held = self.held[sample.holder]
            del held[sample.sample_id], self._deadlines[sample]
            if not held:
                del self.held[sample.holder]
            sample.holder = ""

    def expired(self, now: float) -> Iterator[Sample]:
        """Yield samples of expired leases; the caller releases each before asking for the next."""
        while self._deadlines:
            sample, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                return
            yield sample
