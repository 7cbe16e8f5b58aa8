"""What a process did lately: spans for a timeline, and shares of its time by activity."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_S = 10.0  # shares are of so much time
KEPT = 256  # spans that nobody has taken yet
JOIN_S = 0.001  # two of one name that are closer are one


class Span(NamedTuple):
    """Something that took from `start` to `end`, seconds since the epoch."""

    name: str
    start: float
    end: float


class SpanLog:
    """Takes spans in their order from one thread; others read. What is old goes.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._window: deque[Span] = deque()
        self._fresh: deque[Span] = deque(maxlen=KEPT)
        self._open: tuple[str, float] | None = None

    def begin(self, name: str, start: float) -> None:
        """Something has begun, and will be added once it is over."""
        with self._lock:
            self._open = (name, start)

    def add(self, span: Span) -> None:
        """`span` is over."""
        with self._lock:
            self._open = None
            self._window.append(span)
            last = self._fresh[-1] if self._fresh else None
            if last and last.name == span.name and 0 <= span.start - last.end < JOIN_S:
                self._fresh[-1] = Span(span.name, last.start, span.end)
            else:
                self._fresh.append(span)
            self._forget(span.end)

    def take(self) -> list[Span]:
        """The newest spans since the last call."""
        with self._lock:
            taken = list(self._fresh)
            self._fresh.clear()
            return taken

    def shares(self) -> dict[str, float]:
        """Share of each activity in the last `WINDOW_S` seconds, as far back as is known."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            spans = list(self._window)
            if self._open is not None:
                spans.append(Span(*self._open, now))
        if not spans:
            return {}
        since = max(spans[0].start, now - WINDOW_S)
        total = now - since
        seconds: dict[str, float] = {}
        for span in spans:
            spent = min(span.end, now) - max(span.start, since)
            if spent > 0 and total > 0:
                seconds[span.name] = seconds.get(span.name, 0.0) + spent
        return {name: min(1.0, spent / total) for name, spent in seconds.items()}

    def _forget(self, now: float) -> None:
        while self._window and self._window[0].end < now - WINDOW_S:
            self._window.popleft()
