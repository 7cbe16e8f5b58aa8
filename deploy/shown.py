"""Paths for people, and output that may fail without ending a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast


def shown_path(path: Path) -> str:
    """Return `path` from the current folder, if it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@contextmanager
def best_effort_output() -> Iterator[None]:
    """Continue when standard output is closed or its disk is full: a run is worth more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _BestEffort(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _BestEffort:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stream, name)
        return partial(self._attempt, method) if name in ("write", "flush") else method

    def _attempt(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # with what Python has not written yet
            os.close(nowhere)
