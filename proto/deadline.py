"""Limits to waits, also by bytes to move, and an error that names the awaited event."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from umbra.proto.errors import DeadlineError, UmbraError

LEAST_RATE = 20e6  # bytes per second: a link of 1 Gbit/s that six share


@dataclass(frozen=True, slots=True)
class Pace:
    """Time limit for moving bytes: over a link, to a device, or within memory."""

    base_s: float  # however few they are
    least_rate: float  # bytes per second that whatever works moves at the least

    def limit_s(self, nbytes: int, *, parts: int = 1) -> float:
        """Return seconds that `nbytes` may take; of so many equal `parts` of that time, one."""
        return (self.base_s + nbytes / self.least_rate) / parts

    def after(self, base_s: float) -> Pace:
        return Pace(base_s, self.least_rate)


class Deadline:
    """When to give up waiting: `seconds` from now on. `check` raises `error` then."""

    def __init__(
        self,
        seconds: float,
        complaint: str = "nothing happened",  # the begin of its sentence
        *,
        clock: Callable[[], float] = time.monotonic,
        error: type[UmbraError] = DeadlineError,
    ) -> None:
        self._seconds = seconds
        self._complaint = complaint
        self._clock = clock
        self._error = error
        self.restart()

    def restart(self) -> None:
        self._at = self._clock() + self._seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - self._clock())

    @property
    def passed(self) -> bool:
        return self._clock() >= self._at

    def check(self, detail: str = "") -> None:
        """Raise the error if the deadline has passed; `detail` ends its sentence."""
        if self.passed:
            raise self._error(f"{self._complaint} within {self._seconds:g} s{detail}")
