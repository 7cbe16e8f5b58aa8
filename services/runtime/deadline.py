"""A limit to a wait, whose error names what was awaited."""

from __future__ import annotations

import time
from collections.abc import Callable

from umbra.proto.errors import DeadlineError, UmbraError


class Deadline:
    """When to give up waiting.

    Args:
        seconds: from now on.
        complaint: what to say then, before " within ... s": "no weight hub joined the run".
        clock: seconds, monotonic.
        error: what `check` raises.
    """

    def __init__(
        self,
        seconds: float,
        complaint: str = "nothing happened",
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
        """Allow the full time again from now on."""
        self._at = self._clock() + self._seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 from then on."""
        return max(0.0, self._at - self._clock())

    @property
    def passed(self) -> bool:
        """Whether it is time to give up."""
        return self._clock() >= self._at

    def check(self, detail: str = "") -> None:
        """Raise the error if the deadline has passed; `detail` ends its sentence."""
        if self.passed:
            raise self._error(f"{self._complaint} within {self._seconds:g} s{detail}")
