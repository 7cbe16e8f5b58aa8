"""How far this machine's clock is from another's, measured by round trips; and from the epoch."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

KEPT = 16  # round trips that are looked at: the fastest of them counts
READINGS = 5  # of two clocks, of which the best counts: this process may be stopped in between


@dataclass(frozen=True, slots=True)
class Offset:
    """Add `seconds` to a time of this clock to get the other's; right to within `error_s`."""

    seconds: float
    error_s: float


def monotonic_to_epoch() -> float:
    """What to add to `time.monotonic()` to get seconds since the epoch."""
    clock = ClockOffset()
    for _ in range(READINGS):
        clock.measured(sent=time.monotonic(), read=time.time(), received=time.monotonic())
    assert clock.best is not None
    return clock.best.seconds


class ClockOffset:
    """The offset as of the last round trips.

    The other side's clock was read between `sent` and `received` of ours, most likely in the
    middle: then the offset is `read - (sent + received) / 2`, wrong by half of the round trip at
    most. As NTP does, the fastest of the last round trips is believed: it waited least on the way.
    """

    def __init__(self) -> None:
        self._trips: deque[Offset] = deque(maxlen=KEPT)

    def measured(self, *, sent: float, read: float, received: float) -> None:
        """A round trip, in seconds since the epoch: two readings of our clock, one of theirs."""
        if received >= sent:  # else our clock was set meanwhile
            offset = read - (sent + received) / 2
            self._trips.append(Offset(offset, (received - sent) / 2))

    @property
    def best(self) -> Offset | None:
        """The offset; None before the first round trip."""
        return min(self._trips, key=lambda trip: trip.error_s) if self._trips else None
