"""`metrics.jsonl` of a run: one JSON object per line, appended by every service on this machine.

No process ends for want of a line of it: what a full disk does not take is left out and counted. A
line that was cut off so is no JSON, and readers pass over it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from umbra.proto.bounds import Number
from umbra.proto.errors import UNREADABLE

log = logging.getLogger(__name__)

WINDOW_S = 10.0  # shares are of so much time
KEPT = 256  # spans that nobody has taken yet
JOIN_S = 0.001  # two of one name that are closer are one


_EPOCH = time.time() - time.monotonic()


def steady_clock() -> float:
    """Return seconds since the epoch, which go on evenly when the machine's clock is set."""
    return _EPOCH + time.monotonic()


class Span(NamedTuple):
    """Something that a process did, seconds since the epoch by its own clock."""

    name: str
    start: Number
    end: Number


class SpanLog:
    """A log of recent spans, in seconds since 1970, in order, from one thread; others read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._window: deque[Span] = deque()
        self._fresh: deque[Span] = deque(maxlen=KEPT)
        self._open: tuple[str, float] | None = None

    def begin(self, name: str, start: float) -> None:
        with self._lock:
            self._open = (name, start)

    def add(self, span: Span) -> None:
        with self._lock:
            self._open = None
            self._window.append(span)
            last = self._fresh[-1] if self._fresh else None
            if last and last.name == span.name and 0 <= span.start - last.end < JOIN_S:
                span = Span(span.name, self._fresh.pop().start, span.end)
            self._fresh.append(span)
            self._forget(span.end)

    def take(self) -> list[Span]:
        with self._lock:
            spans = list(self._fresh)
            self._fresh.clear()
        return spans

    def shares(self) -> dict[str, float]:
        """Return the share of each activity in the last `WINDOW_S` seconds, as far as known."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            spans = list(self._window)
            if self._open is not None:
                spans.append(Span(*self._open, now))
        since = max(min((span.start for span in spans), default=now), now - WINDOW_S)
        seconds: dict[str, float] = defaultdict(float)
        for span in spans:
            seconds[span.name] += max(0.0, min(span.end, now) - max(span.start, since))
        total = now - since
        return {name: min(1.0, part / total) for name, part in seconds.items() if part > 0}

    def _forget(self, now: float) -> None:
        while self._window and self._window[0].end < now - WINDOW_S:
            self._window.popleft()


class MetricsFile:
    """Append-only JSON lines; each is one `write` to an O_APPEND file: processes don't interleave.

    A row that the disk does not take is lost; `lost` counts them, and the log has the 1st, 2nd,
    4th, ... Watchers get the last `spans`, and `on_push` is called with the fields of each push.
    The file is made if it is missing; None: nothing is written.
    """

    def __init__(
        self, path: Path | None, service: str, clock: Callable[[], float] = steady_clock
    ) -> None:
        self.service = service
        self.spans = SpanLog(clock)
        self.on_push: Callable[..., None] | None = None
        self.lost = 0  # rows
        self._torn = False  # the last row ended somewhere in its middle
        self._clock = clock  # seconds since the epoch
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._fd = None if path is None else os.open(path, flags, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        if self._fd is not None:
            row = {"time": self._clock(), "service": self.service, "kind": kind, **fields}
            self._append(self._fd, json.dumps(row, separators=(",", ":")).encode() + b"\n")
        if kind == "span":
            self.spans.add(Span(span_name(fields), fields["start"], fields["end"]))
        elif kind == "push" and self.on_push is not None:
            self.on_push(**fields)

    def _append(self, fd: int, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written, reason = 0, "No space left on device"  # what else makes a write a short one
        try:
            written = os.write(fd, line)
        except OSError as error:
            reason = error.strerror or str(error)
        if written == len(line):
            self._torn = False
            return
        self._torn = self._torn or written > 0
        self.lost += 1
        if not self.lost & (self.lost - 1):
            log.warning("metrics cannot be written, %d rows are lost: %s", self.lost, reason)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._clock()
        self.spans.begin(name, start)
        try:
            yield
        finally:
            self.write("span", name=name, start=start, end=self._clock())

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def span_name(row: dict[str, Any]) -> str:
    reason = row.get("reason")
    return f"{row['name']}: {reason}" if reason else str(row["name"])


def parse_row(line: str) -> dict[str, Any] | None:
    """Return the row in a line of the file; None if a crash or a full disk cut it."""
    with suppress(*UNREADABLE):
        row = json.loads(line)
        return row if isinstance(row, dict) and "kind" in row else None
    return None
