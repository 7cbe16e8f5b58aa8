"""Waiting: deadlines that grow with the slowness of the machine, so that a busy one fails no test.

Also whether a process lives, and a port on which something will listen later.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

QUIET_START_S = 0.07  # `START` on a machine of 2026 with nothing else on it
START = "import asyncio, json, subprocess"
LEAST = 2.0  # the suite itself keeps every core busy
MOST = 60.0  # a hang must still be an answer within a day
RESERVE = 5.0  # other work may come after the measurement
VALID_S = 10.0

_measured = (-VALID_S, LEAST)  # when, and how slow a start was
T = TypeVar("T")


def slowness() -> float:
    """Return how many times longer than on a quiet machine things take now.

    The greater of the time to start an interpreter, measured every 10 s at most, and of the load
    per core: the first sees a slow processor, the second the work that has come since.
    """
    global _measured
    begin = time.perf_counter()
    if begin - _measured[0] >= VALID_S:
        subprocess.run([sys.executable, "-c", START], check=True)
        _measured = begin, (time.perf_counter() - begin) / QUIET_START_S
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(LEAST, _measured[1], load), MOST)


def seconds(quiet: float) -> float:
    """Return how long work of `quiet` seconds takes here; for settings that a test sits out."""
    return quiet * slowness()


def limit(quiet: float) -> float:
    """Return when to give up work of `quiet` seconds; it costs time only in a test that hangs."""
    return RESERVE * seconds(quiet)


def until(
    condition: Callable[[], T | None],
    what: str | Callable[[], object],
    turn: Callable[[], object] = lambda: time.sleep(0.02),
    *,
    quiet_s: float = 30.0,
) -> T:
    """Return what `condition` returns once that is true; call `turn` while it is not.

    Fail with `what` after `quiet_s` seconds, stretched by how slow the machine is then.
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


def reserved_port() -> socket.socket:
    """Return a port that the kernel gives to nobody else, and beside which one may listen.

    Others run on this machine: a port that was merely free a moment ago may be theirs.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port
