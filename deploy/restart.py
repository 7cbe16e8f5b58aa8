"""When a process that failed is started again: after a growing pause, and not for ever."""

from __future__ import annotations

from collections import deque


class RestartPolicy:
    """Exponential back-off with a limit per window; no clock of its own.

    Args:
        first_s: seconds until the first restart; doubles with every restart in the window.
        limit: restarts within `window_s` seconds; one more failure is final.
    """

    def __init__(self, *, first_s: float = 0.5, limit: int = 5, window_s: float = 60.0) -> None:
        self.first_s = first_s
        self.limit = limit
        self.window_s = window_s
        self._restarts: deque[float] = deque()

    def failed(self, now: float) -> float | None:
        """The process failed at `now`: seconds until its restart, or None for never."""
        while self._restarts and now - self._restarts[0] > self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return None
        delay = self.first_s * 2 ** len(self._restarts)
        self._restarts.append(now)
        return delay
