"""Deadlines that grow with the slowness of the machine, so that a busy one fails no test."""

import os
import subprocess
import sys
import time

QUIET_START_S = 0.07  # `START` on a machine of 2026 with nothing else on it
START = "import asyncio, json, subprocess"
LEAST = 2.0  # the suite itself keeps every core busy
MOST = 60.0  # a hang must still be an answer within a day
RESERVE = 5.0  # other work may come after the measurement
VALID_S = 10.0

_measured = (-VALID_S, LEAST)  # when, and how slow a start was


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
