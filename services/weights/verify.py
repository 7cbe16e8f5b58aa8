"""Checksums of a version, computed from the very bytes that its writer copies, and slots in use.

A receiver on the hub's host loads from the arena itself. The hub has verified the slot, which no
process can write while it is published; a load counts if the sequence number of the slot is the
same before and after it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import xxhash

from umbra.proto.errors import UmbraError
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import wrong_checksum

THREADS = min(4, os.cpu_count() or 1)  # of a process, that copy and compute checksums
BLOCK_BYTES = 1 << 20  # copied and hashed at once: such a copy the C library writes past the cache
AHEAD = 2  # buckets for each thread, at most, that wait to be copied

OVERWRITTEN = "its slot was written again"


class ChangedError(UmbraError):
    """A version changed while it was loaded: the engine has neither it nor another one."""


Move = Callable[[int, int], memoryview]
"""Copies bytes from one place of a tensor to another; returns them as they are to be there."""

Piece = tuple[int, int, int]
"""Start and end of bytes of one bucket, and their checksum."""


class Checksums:
    """The checksums of a version's buckets, computed by the threads that copy it, in order.

    `copy` hashes bytes while they are copied. `until`, for what a GPU copies, and `result`, for all
    the rest, have them read from the version's memory.

    Args:
        threads: that copy and read at the same time; with one, the caller does it.
        is_whole: all of the version is copied here; else nothing is read that others may write.
    """

    def __init__(
        self, manifest: Manifest, data: memoryview, threads: int = 1, *, is_whole: bool = True
    ) -> None:
        self._manifest = manifest
        self._ends = [end for _, end in manifest.buckets]
        self._data = data
        self._threads = threads
        self._is_whole = is_whole
        # Nobody loads padding: it is hashed from memory, with the tensor before it.
        starts = [*(entry.offset for entry in manifest.tensors[1:]), manifest.total_bytes]
        self._padded = {
            entry.offset + entry.nbytes: start
            for entry, start in zip(manifest.tensors, starts, strict=True)
        }
        self._bucket = -1  # of the moves that wait for the rest of their bucket
        self._moves: list[tuple[int, int, int, Move]] = []
        self._copying: deque[Future[list[Piece]]] = deque()
        self._pieces: list[Piece] = []
        self._touched: set[int] = set()  # buckets of which bytes are copied or read
        self._behind = 0  # buckets before this one are among them

    def copy(self, start: int, end: int, move: Move) -> None:
        """Have `move` copy bytes `[start, end)` by blocks, given places from `start` on.

        What it returns is hashed.
        """
        at = start
        while at < end:
            bucket = bisect_right(self._ends, at)
            if bucket != self._bucket:
                self._submit()
                self._bucket = bucket
                self._touched.add(bucket)
            stop = min(end, self._ends[bucket])
            self._moves.append((start, at, stop, move))
            at = stop

    def until(self, end: int) -> None:
        """Note that the first `end` bytes are in place; those not copied here are read."""
        while self._is_whole and self._behind < len(self._ends) and self._ends[self._behind] <= end:
            if self._behind not in self._touched:
                self._read(self._behind)
            self._behind += 1

    def pieces(self) -> list[Piece]:
        """Wait for all copies; return their checksums in order: of whole buckets, or of parts."""
        self._submit()
        while self._copying:
            self._pieces += self._copying.popleft().result()
        return sorted(self._pieces)

    def result(self) -> list[int]:
        """Return the checksum of every bucket, once all of the version is in place."""
        buckets = self._manifest.buckets
        whole = {piece[:2] for piece in self.pieces()}
        for bucket, place in enumerate(buckets):
            if place not in whole:
                self._read(bucket)
        sums = {piece[:2]: piece[2] for piece in self.pieces()}
        return [sums[place] for place in buckets]

    def wrong(self, wanted: Sequence[int]) -> str:
        """Name the first bucket with a wrong checksum; empty if there is none."""
        for bucket, (actual, expected) in enumerate(zip(self.result(), wanted, strict=True)):
            if actual != expected:
                return wrong_checksum(self._manifest, bucket)
        return ""

    def _read(self, bucket: int) -> None:
        start, end = self._manifest.buckets[bucket]
        data = self._data[start:end]
        self.copy(start, end, lambda at, until: data[at:until])

    def _submit(self) -> None:
        moves, self._moves, self._bucket = self._moves, [], -1
        if moves and self._threads == 1:
            self._pieces += self._carry_out(moves)
        elif moves:
            self._copying.append(_pool().submit(self._carry_out, moves))
            while len(self._copying) > AHEAD * self._threads:
                self._pieces += self._copying.popleft().result()

    def _carry_out(self, moves: list[tuple[int, int, int, Move]]) -> list[Piece]:
        """Copy and hash bytes of one bucket; one piece for those without a gap between them."""
        pieces: list[Piece] = []
        begun = at = -1
        hasher = xxhash.xxh3_64()
        for origin, begin, end, move in moves:
            if begin != at:
                if begun < at:
                    pieces.append((begun, at, hasher.intdigest()))
                begun, hasher = begin, xxhash.xxh3_64()
            for place in range(begin, end, BLOCK_BYTES):
                hasher.update(move(place - origin, min(place + BLOCK_BYTES, end) - origin))
            at = self._padded.get(end, end)
            hasher.update(self._data[end:at])
        pieces.append((begun, at, hasher.intdigest()))
        return pieces


class SlotGuard:
    """A check that a slot stays as it is while an engine loads from it.

    Args:
        sequence: the sequence number of the slot, a view of one u64 in shared memory.
        check: raises an OSError or an UmbraError if the memory is gone.
    """

    def __init__(self, sequence: memoryview, check: Callable[[], None]) -> None:
        self._sequence = sequence
        self._check = check
        self._begun: int = sequence[0]

    @property
    def is_overwritten(self) -> bool:
        """Return whether the slot is being written, or was since this guard was made."""
        now: int = self._sequence[0]
        return now != self._begun or now % 2 == 1

    @property
    def is_readable(self) -> bool:
        try:
            self._check()
        except (OSError, UmbraError):
            return False
        return not self.is_overwritten

    def verify(self) -> None:
        """Raise ChangedError if what was loaded may be of two versions."""
        if self.is_overwritten:
            raise ChangedError(OVERWRITTEN)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="umbra-checksums")


os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads are not there
