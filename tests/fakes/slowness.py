"""Deadlines that grow with the slowness of the machine, so that a busy one fails no test.

A deadline only ends a test that hangs, so it costs nothing to be generous.
"""

import functools
import os
import subprocess
import sys
import time

QUIET_START_S = 0.07  # `START` on a machine of 2026 with nothing else on it
START = "import asyncio, json, subprocess"
LEAST = 2.0  # the suite itself keeps every core busy
MOST = 60.0  # a hang must still be an answer within a day


def slowness() -> float:
    """How many times longer than on a quiet machine things take, now.

    The greater of what it took to start an interpreter, measured once a process, and of the load
    per core: the first sees a slow processor, the second the work that has come since.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(LEAST, _start(), load), MOST)


@functools.cache
def _start() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", START], check=True)
    return (time.perf_counter() - begin) / QUIET_START_S


def seconds(quiet: float) -> float:
    """What may take `quiet` seconds on a quiet machine, in seconds on this one."""
    return quiet * slowness()
