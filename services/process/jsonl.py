"""Reading JSON-lines files, with errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UNREADABLE, UsageError


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of `path`, one per line; blank lines are skipped.

    Raises:
        UsageError: unreadable, empty, or a line that is no JSON object.
    """
    return [row for _, row in read_numbered(path)]


def read_numbered(path: str | Path, called: str = "") -> list[tuple[int, dict[str, Any]]]:
    """`read_jsonl` with the line number (1-based) of every object; errors say `called`."""
    called = called or str(path)
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{called} cannot be read: {error.strerror}") from error
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, msgspec.json.decode(line, type=dict[str, Any])))
        except UNREADABLE as error:
            raise UsageError(f"{called}, line {number}: not a JSON object ({error})") from error
    if not rows:
        raise UsageError(f"{called} is empty: it needs one JSON object per line")
    return rows
