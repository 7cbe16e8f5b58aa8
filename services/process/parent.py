"""The child's side of `child.py`: it reports when the process is up, and leaves no orphan."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import MutableMapping
from typing import Any

PARENT_PID_VARIABLE = "UMBRA_PARENT_PID"
READY_FD_VARIABLE = "UMBRA_READY_FD"
SEARCH_VARIABLE = "UMBRA_SEARCH"  # folders that `umbra` puts behind all others in sys.path
GRACE_S = 15.0  # to drain and to remove shared memory before the hard end
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def parents_end() -> socket.socket:
    """Return the socket to the parent, given to this process as its stdin, which is empty then."""
    end = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return end


def tell_ready(facts: dict[str, Any]) -> None:
    """Write `facts` (one JSON line) to whoever started this process and waits for it, if any."""
    fd = os.environ.pop(READY_FD_VARIABLE, None)
    if fd is not None:
        os.write(int(fd), json.dumps(facts).encode() + b"\n")
        os.close(int(fd))


def is_supervised() -> bool:
    """Return whether a process of ours started this one, by UMBRA_PARENT_PID."""
    return PARENT_PID_VARIABLE in os.environ


def bypass_proxy(environ: MutableMapping[str, str], *hosts: str) -> None:
    """Have clients with this environment reach `hosts` directly, whatever HTTP_PROXY says."""
    text = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    entries = text.split(",") if text else []
    if entries != ["*"]:
        entries += [host for host in hosts if host not in entries]
        environ["no_proxy"] = environ["NO_PROXY"] = ",".join(entries)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Get signal `number` when the parent dies, and end hard if draining then takes too long.

    Does nothing unless the parent asked for it through the environment.
    """
    if not is_supervised():
        return
    parent = int(os.environ[PARENT_PID_VARIABLE])
    if number == signal.SIGTERM:
        watch = threading.Thread(target=_watch, args=(parent,), name="umbra-parent", daemon=True)
        watch.start()
    signal_at_death_of(parent, number)


def signal_at_death_of(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent, process `parent`, dies.

    More precisely: when the thread of the parent ends that has forked this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os.kill(os.getpid(), number)


def inherit_orphans(enabled: bool) -> None:
    """Adopt orphaned descendants of this process, or stop adopting them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(GRACE_S)
    os._exit(5)
