"""Memory for the processes of this host, or of the container that they are in.

Large memory is asked for before it is taken: Linux hands out more than it has, and then ends a
process that may be another one.
"""

from __future__ import annotations

import os
from pathlib import Path

from umbra.proto.errors import StartupError

MEMINFO = Path("/proc/meminfo")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CGROUP_STATS = Path("/sys/fs/cgroup/memory.stat")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _container_limit()
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Return the bytes that can be taken now without swapping; cached files count as free."""
    kib = _number(MEMINFO, "MemAvailable:")
    free = host_bytes() if kib is None else 1024 * kib
    limit = _container_limit()
    if limit is None or not CGROUP_USED.is_file():
        return free
    used = int(CGROUP_USED.read_text(encoding="ascii"))
    cached = _number(CGROUP_STATS, "inactive_file") or 0
    return max(0, min(free, limit - used + cached))


def ask_for(nbytes: int, what: str, remedy: str) -> None:
    """Raise StartupError with a `remedy` unless `nbytes` are free for `what` (plural)."""
    free = available_bytes()
    if nbytes > free:
        raise StartupError(
            f"{what} need {nbytes / 2**30:.2f} GiB of memory, and {free / 2**30:.2f} GiB are free "
            f"here: {remedy}"
        )


def _container_limit() -> int | None:
    text = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else "max"
    return int(text) if text.isdigit() else None


def _number(path: Path, name: str) -> int | None:
    if path.is_file():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None
