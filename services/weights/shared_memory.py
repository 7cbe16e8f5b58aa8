"""Memory of this process that its child processes can map too, and versions in it.

Each block is an anonymous file (memfd). It has no name, so nothing is left behind by a process that
was killed; the size of /dev/shm does not bound it; and others of the same user open it by
/proc/<pid>/fd/<number>.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from umbra.proto.errors import StartupError, UsageError
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import Part, largest_bucket, with_starts
from umbra.services.weights.memory import copy

PART_BYTES = (
    64 << 20
)  # of a version that workers load at once, if it does not lie where they see it


@dataclass(frozen=True, slots=True)
class _Block:
    map: weakref.ref[mmap.mmap]
    address: int
    size: int
    path: str


class SharedMemory:
    """Allocates blocks, and tells where in which block some memory lies.

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

    def locate(self, memory: memoryview) -> tuple[str, int] | None:
        """Path and offset by which another process finds the bytes of `memory` (writable).

        None if they are not in a block.
        """
        if not len(memory):
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for block in self._blocks:
            offset = address - block.address
            if 0 <= offset <= block.size - len(memory) and block.map() is not None:
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


def cut(manifest: Manifest, part_bytes: int) -> list[Manifest]:
    """Layouts of consecutive parts, in whole tensors, of at most `part_bytes` where they allow it.

    Each has one bucket, which says where in the version the part lies; offsets count from there.
    """
    ends = [entry.offset for entry in manifest.tensors[1:]] + [manifest.total_bytes]
    parts: list[Manifest] = []
    start, taken = 0, 0
    for index, end in enumerate(ends):
        following = ends[index + 1] if index + 1 < len(ends) else None
        if following is not None and following - start <= part_bytes:
            continue
        entries = [
            msgspec.structs.replace(entry, offset=entry.offset - start)
            for entry in manifest.tensors[taken : index + 1]
        ]
        parts.append(
            Manifest(tensors=entries, buckets=[(start, end)], total_bytes=end - start, digest="")
        )
        start, taken = end, index + 1
    return parts


def shared(
    manifest: Manifest, parts: Iterable[Part], memory: SharedMemory, part_bytes: int = PART_BYTES
) -> Iterator[tuple[str, Manifest]]:
    """Path and layout of each part that workers can map; good until the next one is asked for.

    A version that lies in `memory` as a whole is one part, and is not copied. Of any other, tensors
    are copied as soon as all their bytes have come, part after part into the same block: to make
    one takes longer than to fill it.

    Args:
        manifest: the layout.
        parts: as `Engine.load` takes them.
        memory: where the block is made.
        part_bytes: of a part, at least a bucket, and at most that where whole tensors allow it.

    Raises:
        UsageError: a part is not in host memory.
        PeerLostError: the parts end before the version does.
    """
    layouts: Iterator[Manifest] | None = None
    layout: Manifest | None = None
    block = memoryview(b"")
    for start, part in with_starts(manifest, parts):
        if not isinstance(part, memoryview):
            raise UsageError(
                "weights for vLLM have to be in host memory: set weight_hub.plane to another plane"
            )
        end = start + len(part)
        if layouts is None:
            place = memory.locate(part) if end == manifest.total_bytes else None
            if place is not None:
                yield place[0], _moved(manifest, place[1])
                continue
            cuts = cut(manifest, max(part_bytes, largest_bucket(manifest), len(part)))
            block = memory.allocate(max(each.total_bytes for each in cuts))
            layouts = iter(cuts)
            layout = next(layouts, None)
        while layout is not None:
            (begin, stop) = layout.buckets[0]
            first, last = max(start, begin), min(end, stop)
            copy(part[first - start : last - start], block[first - begin : last - begin])
            if stop > end:
                break  # the rest is in the next part
            place = memory.locate(block)
            assert place is not None
            yield place[0], layout
            layout = next(layouts, None)


def _moved(manifest: Manifest, by: int) -> Manifest:
    if not by:
        return manifest
    entries = [
        msgspec.structs.replace(entry, offset=entry.offset + by) for entry in manifest.tensors
    ]
    return msgspec.structs.replace(manifest, tensors=entries)
