"""`metrics.jsonl` of a run: one JSON object per line, appended by every service on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MetricsFile:
    """Append-only JSON lines; each is one `write` to an O_APPEND file: processes don't interleave.

    Args:
        path: the file, made if missing; None writes nothing.
        service: stamped on every line.
    """

    def __init__(self, path: Path | None, service: str) -> None:
        self.service = service
        self._fd = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        )

    def write(self, kind: str, **fields: Any) -> None:
        """Append one row."""
        if self._fd is not None:
            row = {"time": time.time(), "service": self.service, "kind": kind, **fields}
            os.write(self._fd, json.dumps(row, separators=(",", ":")).encode() + b"\n")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Append a row of kind "span" with `start` and `end` (seconds since the epoch)."""
        start = time.time()
        yield
        self.write("span", name=name, start=start, end=time.time())

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
