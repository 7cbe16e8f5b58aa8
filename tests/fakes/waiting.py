"""Waiting in tests: until a condition holds, with one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fakes.slowness import seconds

T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    what: str | Callable[[], object],
    turn: Callable[[], object] = lambda: time.sleep(0.02),
    *,
    quiet_s: float = 30.0,
) -> T:
    """Return what `condition` returns once that is true; `turn` is called while it is not.

    Args:
        condition: looks, and is called again and again.
        what: has not happened, or how things stand, for the failure.
        turn: lets the tested object go on.
        quiet_s: seconds on a quiet machine. When they are over, the wait is extended by how slow
            the machine is then.
    """
    begin, limit_s = time.monotonic(), quiet_s
    while not (found := condition()):
        if time.monotonic() - begin > limit_s:
            longer = max(limit_s, seconds(quiet_s))
            over = longer == limit_s or time.monotonic() - begin > longer
            assert not over, f"waited in vain: {what() if callable(what) else what}"
            limit_s = longer
        turn()
    return found


def is_alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
