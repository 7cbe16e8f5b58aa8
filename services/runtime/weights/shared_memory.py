"""Memory of this process that its child processes can map too.

Each block is an anonymous file (memfd). It has no name, so nothing is left behind by a process that
was killed; the size of /dev/shm does not bound it; and others of the same user open it by
/proc/<pid>/fd/<number>.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass

from umbra.proto.errors import StartupError


@dataclass(frozen=True, slots=True)
class _Block:
    map: weakref.ref[mmap.mmap]
    address: int
    size: int
    path: str


class SharedMemory:
    """Allocates blocks, and tells where in which block an address lies.

    A block lives as long as somebody holds a view of it.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def allocate(self, size: int) -> memoryview:
        """`size` writable bytes, already faulted in.

        Raises:
            StartupError: there is not so much memory.
        """
        fd = os.memfd_create("umbra-staging", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            block = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise StartupError(
                f"cannot allocate {size} bytes of shared memory for new weights: {error.strerror}"
            ) from error
        weakref.finalize(block, os.close, fd)
        first = ctypes.c_char.from_buffer(block)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self._blocks = [kept for kept in self._blocks if kept.map() is not None]
        self._blocks.append(_Block(weakref.ref(block), ctypes.addressof(first), size, path))
        return memoryview(block)

    def path(self, block: memoryview) -> str:
        """The path by which another process maps `block`, which came from `allocate`."""
        place = self.locate(ctypes.addressof(ctypes.c_char.from_buffer(block)), 1)
        assert place is not None
        return place[0]

    def locate(self, address: int, size: int) -> tuple[str, int] | None:
        """Path and offset by which another process finds `size` bytes at `address` of this one.

        None if they are not in a block.
        """
        for block in self._blocks:
            offset = address - block.address
            if 0 <= offset <= block.size - size and block.map() is not None:
                return block.path, offset
        return None


class MappedBlocks:
    """The other side: blocks of another process, mapped once and kept while they exist."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, memoryview]] = {}  # by path: inode and bytes

    def view(self, path: str) -> memoryview:
        """All bytes of the block at `path`, not to be written.

        Raises:
            StartupError: it is gone, or not ours to open.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # torch wants writable memory
        except OSError as error:
            raise StartupError(
                f"cannot open the generator's staging memory {path}: {error.strerror}; the "
                "engine's workers must run on its host, as its user"
            ) from error
        try:
            status = os.fstat(fd)
            known = self._maps.get(path)
            if known is not None and known[0] == status.st_ino:
                return known[1]
            # A number of a file that was closed is given to the next one.
            self._maps = {kept: held for kept, held in self._maps.items() if os.path.exists(kept)}
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            view = memoryview(mmap.mmap(fd, status.st_size, flags=flags))
            self._maps[path] = (status.st_ino, view)
            return view
        finally:
            os.close(fd)
