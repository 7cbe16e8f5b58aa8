"""Memory that holds weights: private, shared with worker processes, and copies between them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from umbra.proto.errors import StartupError

KEPT_BYTES = 256 << 20  # of freed memory, per heap
MAPPED_BYTES = 32 << 20  # the most that glibc takes for M_MMAP_THRESHOLD
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_S = 10.0  # at least, between two trims
TRIM_RESTS = 1000.0  # a trim's own duration, until the next one


class Mapping(mmap.mmap):
    """Mapped memory that calls `unmapping` before it is unmapped, as its last view ends."""

    ranges: Sequence[tuple[int, int]] = ()
    """The ranges of bytes that have memory; empty = all."""
    unmapping: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unmapping is not None:
            self.unmapping()


def private_memory(size: int) -> memoryview:
    """Allocate `size` writable bytes of this process alone, faulted in.

    In huge pages where the kernel has them: copies and checksums are a fifth faster.
    """
    memory = Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    return view


def copy(source: bytes | memoryview, target: memoryview) -> None:
    """Copy `source` to `target`, of the same length, without the interpreter's lock.

    `target[:] = source` holds the lock; copying that way in a thread slowed a decoding engine down
    to a tenth of its speed.
    """
    size = len(target)
    if len(source) != size:
        raise ValueError(f"{len(source)} bytes do not fill {size}")
    if size:
        origin = source if isinstance(source, bytes) else _place(source)
        ctypes.memmove(_place(target), origin, size)


def _place(memory: memoryview) -> Any:
    """Return a pointer to `memory`, which keeps it mapped."""
    return ctypes.byref(ctypes.c_char.from_buffer(memory))


# Of each block: its mapping, address, size and path.
_blocks: list[tuple[weakref.ref[mmap.mmap], int, int, str]] = []


def shared_memory(size: int) -> memoryview:
    """Allocate `size` writable bytes that processes of the same user can map, faulted in.

    An anonymous file (memfd), freed with its last view: a killed process leaves nothing behind, and
    the size of /dev/shm is no bound.

    Raises:
        StartupError: there is too little memory.
    """
    fd = os.memfd_create("umbra-staging", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
        block = Mapping(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.close(fd)
        raise StartupError(
            f"cannot allocate {size} bytes of shared memory for new weights: {error.strerror}"
        ) from error
    weakref.finalize(block, os.close, fd)
    share(block, size, fd)
    return memoryview(block)


def share(block: mmap.mmap, size: int, fd: int) -> None:
    """Let `locate` find the bytes of `block`, which maps the file `fd`."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    _blocks[:] = [block for block in _blocks if block[0]() is not None]
    _blocks.append((weakref.ref(block), address, size, f"/proc/{os.getpid()}/fd/{fd}"))


def locate(memory: memoryview) -> tuple[str, int] | None:
    """Return path and offset at which another process maps `memory`; None if it is not shared."""
    if not len(memory):
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for block, start, size, path in tuple(_blocks):  # another thread may share more
        if 0 <= address - start <= size - len(memory) and block() is not None:
            return path, address - start
    return None


class MappedBlocks:
    """Blocks of another process, mapped once and kept while they exist."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, memoryview]] = {}  # by path: inode and bytes

    def view(self, path: str) -> memoryview:
        """Map the block at `path` to read; StartupError if it is gone or not ours to open."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # torch wants writable memory
        except OSError as error:
            raise StartupError(
                f"cannot open the generator's staging memory {path}: {error.strerror}; the "
                "engine's workers must run on its host, as its user"
            ) from error
        try:
            status = os.fstat(fd)
            # The number of a closed file is given to the next one.
            if path not in self._maps or self._maps[path][0] != status.st_ino:
                self._maps = {at: held for at, held in self._maps.items() if os.path.exists(at)}
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                view = memoryview(Mapping(fd, status.st_size, flags=flags))
                self._maps[path] = (status.st_ino, view)
            return self._maps[path][1]
        finally:
            os.close(fd)


# -- the C library's heaps ------------------------------------------------------------------------


def keep_freed_memory() -> bool:
    """Have glibc keep up to `KEPT_BYTES` of freed memory per heap; False if it cannot.

    Otherwise it returns the top of a heap to the kernel, and buckets of 4 MiB fault in again:
    9,000 to 19,000 page faults for 256 MiB over plane `tcp`, up to half of the speed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


class HeapTrimmer:
    """A trimmer that returns freed memory to the kernel, wherever in the heaps; glibc only."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due = 0.0

    def give_back(self, now: float) -> None:
        """Trim the heaps if the last time is long enough ago; `now` is monotonic, in seconds.

        That takes 30 ms for 150 MB in pieces, during which a server does not answer.
        """
        if self._trim is None or now < self._due:
            return
        began = time.perf_counter()
        self._trim(0)
        self._due = now + max(TRIM_S, TRIM_RESTS * (time.perf_counter() - began))
