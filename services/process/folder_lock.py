"""One process at a time: a lock on a folder that goes with the process, and names it to others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "lock"


class HeldError(Exception):
    """Another process has the lock; `pid` is its id, 0 if it did not say."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"process {pid}" if pid else "another process")
        self.pid = pid


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` for the block; the kernel takes it from a process that is killed.

    Raises:
        HeldError: another process holds it.
        OSError: the folder cannot be written to.
    """
    fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            said = os.read(fd, 32)
            raise HeldError(int(said) if said.isdigit() else 0) from error
        os.ftruncate(fd, 0)
        with suppress(OSError):  # a full disk: the lock holds, and names nobody
            os.write(fd, str(os.getpid()).encode())
        yield
    finally:
        os.close(fd)


def is_held(folder: Path) -> bool:
    """Whether a process has the lock of `folder`. A shared lock is tried, for some microseconds."""
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
