"""No orphans: a supervised process ends when its supervisor does, even if that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

PARENT_PID_VARIABLE = "UMBRA_PARENT_PID"
GRACE_S = 15.0  # to drain and to remove shared memory before the hard end
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Get SIGTERM when the parent dies, and end hard if draining then takes too long.

    Does nothing unless the parent asked for it through the environment.
    """
    if not is_supervised():
        return
    parent = os.environ[PARENT_PID_VARIABLE]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    watch = threading.Thread(target=_watch, args=(int(parent),), name="umbra-parent", daemon=True)
    watch.start()
    if os.getppid() != int(parent):  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGTERM)


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return PARENT_PID_VARIABLE in os.environ


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(GRACE_S)
    os._exit(5)
