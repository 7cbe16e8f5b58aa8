"""How far this machine's clock is from another's, measured by round trips."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 16  # round trips that are looked at: the fastest of them counts


@dataclass(frozen=True, slots=True)
class Offset:
    """Add `seconds` to a time of this clock to get the other's; right to within `error_s`."""

    seconds: float
    error_s: float


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
