"""Reading JSON-lines files, with errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UsageError


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of `path`, one per line; blank lines are skipped.

    Raises:
        UsageError: unreadable, empty, or a line that is no JSON object.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}, line {number}: not a JSON object ({error})") from error
    if not rows:
        raise UsageError(f"{path} is empty: it needs one JSON object per line")
    return rows
