"""The process around a worker: whatever the worker starts ends with it.

It runs no code of the user's. As a subreaper it inherits what others leave behind, in sessions of
their own or not, and kills all of it when the worker ends, when it gets SIGTERM, or when the
process that started it dies. The standard library only, of Python 3.10 or newer.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress

from umbra.services.process.parent import PARENT_PID_VARIABLE, signal_at_death_of

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0  # for all processes to be gone
_LOOK_S = 0.001


def enter_guarded() -> None:
    """Return in a child, which ends with this process; what it prints goes to stderr."""
    os.setpgid(0, 0)  # what ends our parent's group must not end us before all else
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: _end_tree(-signal.SIGKILL))
    signal_at_death_of(int(os.environ.get(PARENT_PID_VARIABLE, os.getppid())), signal.SIGTERM)
    if worker := os.fork():
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # the channel is the worker's alone
        while (ended := os.waitpid(-1, 0))[0] != worker:
            pass
        _end_tree(os.waitstatus_to_exitcode(ended[1]))
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_at_death_of(os.getppid(), signal.SIGKILL)


def _end_tree(code: int) -> None:
    """Kill all descendants, then end with `code` (negative: by that signal)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and (children := _children()):
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
        with suppress(ChildProcessError):  # what these leave behind are our children now
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _children() -> list[int]:
    """Return the processes whose parent is this one."""
    ours = str(os.getpid()).encode()
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if stat.read().rpartition(b")")[2].split()[1] == ours:
                found.append(int(name))
    return found
