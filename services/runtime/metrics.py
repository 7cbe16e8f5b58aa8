"""`metrics.jsonl` of a run: one JSON object per line, appended by every service on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umbra.services.runtime.spans import Span, SpanLog


class MetricsFile:
    """Append-only JSON lines; each is one `write` to an O_APPEND file: processes don't interleave.

    Whoever watches gets the same: `spans` holds the last ones, and `on_row` is called with kind and
    fields of every other row.

    Args:
        path: the file, made if missing; None writes nothing.
        service: stamped on every line.
        clock: seconds since the epoch.
    """

    def __init__(
        self, path: Path | None, service: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.service = service
        self.spans = SpanLog(clock)
        self.on_row: Callable[[str, dict[str, Any]], None] | None = None
        self._clock = clock
        self._fd = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        )

    def write(self, kind: str, **fields: Any) -> None:
        """Append one row."""
        if self._fd is not None:
            row = {"time": self._clock(), "service": self.service, "kind": kind, **fields}
            os.write(self._fd, json.dumps(row, separators=(",", ":")).encode() + b"\n")
        if kind == "span":
            self.spans.add(Span(span_name(fields), fields["start"], fields["end"]))
        elif self.on_row is not None:
            self.on_row(kind, fields)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Append a row of kind "span" with `start` and `end` (seconds since the epoch)."""
        start = self._clock()
        self.spans.begin(name, start)
        yield
        self.write("span", name=name, start=start, end=self._clock())

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def span_name(row: dict[str, Any]) -> str:
    """What the span of `row` shows as: its name, with the reason if it has one."""
    reason = row.get("reason")
    return f"{row['name']}: {reason}" if reason else str(row["name"])
