"""The process around a worker: whatever the worker starts ends with it, and its output is limited.

It runs no code of the user's. As a subreaper it inherits what others leave behind, in sessions of
their own or not, and kills all of it when the worker ends, when it gets SIGTERM, or when the
process that started it dies.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from umbra.services.process.parent import PARENT_PID_VARIABLE, inherit_orphans, signal_at_death_of

# Output that is passed on: so much at once, and so much each second after that.
BURST_BYTES, BYTES_PER_S = 1 << 20, 1 << 10
_END_S = 5.0  # for all processes to be gone
_LOOK_S = 0.001
_PIECE = 1 << 16


def enter_guarded() -> None:
    """Return in a child, whose stdout and stderr go through this process, which ends with it."""
    os.setpgid(0, 0)  # what ends our parent's group must not end us before all else
    inherit_orphans(True)
    signal.signal(signal.SIGTERM, lambda *_: _end_tree(-signal.SIGKILL))
    signal_at_death_of(int(os.environ.get(PARENT_PID_VARIABLE, os.getppid())), signal.SIGTERM)
    reads, writes = os.pipe()
    if worker := os.fork():
        os.close(writes)
        _guard(worker, reads)
    os.close(reads)
    for number in (1, 2):
        os.dup2(writes, number)
    os.close(writes)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_at_death_of(os.getppid(), signal.SIGKILL)


def _guard(worker: int, reads: int) -> None:
    """Pass on output until `worker` has ended; end as it did."""
    code: int | None = None

    def reap(*_: object) -> None:
        nonlocal code
        for pid, ended in _reaped():
            code = ended if pid == worker else code

    ticks, tick = os.pipe()  # readable once a child has ended
    os.set_blocking(tick, False)
    signal.set_wakeup_fd(tick, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, reap)
    reap()
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)  # the channel is the worker's alone
    output = Output()
    watched = [reads, ticks]
    while code is None:
        ready = select.select(watched, [], [])[0]
        if ticks in ready:
            os.read(ticks, _PIECE)
        if reads in ready and not output.pass_on(os.read(reads, _PIECE)):
            watched.remove(reads)
    os.set_blocking(reads, False)
    with suppress(BlockingIOError):
        for _ in range(BURST_BYTES // _PIECE):
            if not output.pass_on(os.read(reads, _PIECE)):
                break
    _end_tree(code)


class Output:
    """A writer to stderr, up to a limit."""

    def __init__(self) -> None:
        self._allowance, self._updated_at = float(BURST_BYTES), time.monotonic()
        self._drops = False

    def pass_on(self, data: bytes) -> bool:
        """Write or drop `data`; return false at the end of the input."""
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._updated_at) * BYTES_PER_S, BURST_BYTES)
        self._updated_at = now
        dropped, self._drops = self._drops, len(data) > self._allowance
        with suppress(OSError):  # output is best effort
            if not self._drops:
                self._allowance -= len(data)
                os.write(2, data)
            elif not dropped:
                os.write(2, b"\n(more output of an environment than its limit allows: dropped)\n")
        return bool(data)


def _end_tree(code: int) -> None:
    """Kill all descendants, then exit with `code` (negative: by that signal)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline and (children := _children()):
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
        list(_reaped())  # what these leave behind are our children now
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield the children that have ended, each with its exit code."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            yield child[0], os.waitstatus_to_exitcode(child[1])


def _children() -> list[int]:
    """Return the processes whose parent is this one."""
    own_pid = str(os.getpid()).encode()
    children: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if stat.read().rpartition(b")")[2].split()[1] == own_pid:
                children.append(int(name))
    return children
