"""Waiting in tests: until a condition holds, with one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fakes.slowness import seconds

from umbra.proto.deadline import Deadline

T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    what: str | Callable[[], object],
    turn: Callable[[], object] = lambda: time.sleep(0.02),
    *,
    limit_s: float | None = None,
) -> T:
    """What `condition` returns once that is true; `turn` is called while it is not.

    Args:
        condition: looks, and is called again and again.
        what: has not happened, or how things stand, for the failure.
        turn: lets what is tested go on.
        limit_s: seconds; 30 on a quiet machine unless said otherwise.
    """
    deadline = Deadline(seconds(30.0) if limit_s is None else limit_s)
    while not (found := condition()):
        assert not deadline.passed, f"waited in vain: {what() if callable(what) else what}"
        turn()
    return found
