"""Checksums of a version, computed from the very bytes that its writer and its reader copy.

A receiver on the hub's host has no copy of a version: its engine loads it from the arena. Each slot
has a sequence number, odd while the slot is written. A load counts if the number is the same before
and after it, and if the bytes that the engine has now have the same checksums as the bytes that
the trainer had: so neither a writer nor any other process that touched the memory goes unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol

import xxhash

from umbra.proto.errors import UmbraError
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import ALIGN_BYTES, checksum, wrong_checksum

THREADS = 4  # at most, that compute checksums beside copies of a GPU

OVERWRITTEN = "its slot was written again"


class ChangedError(UmbraError):
    """A version changed while it was loaded: the engine has neither it nor another one."""


class Copied(Protocol):
    """An observer of a version's bytes while they are copied."""

    def copied(self, start: int, block: memoryview) -> None: ...
    def until(self, end: int) -> None: ...


class Checksums:
    """The checksums of a version's buckets, computed while it is copied, in order.

    `copied` takes bytes from the copying thread, while they are in its cache. What a GPU copies is
    not seen on its way: `until` has threads compute it from the version's memory afterwards.
    """

    def __init__(self, manifest: Manifest, data: memoryview) -> None:
        self._buckets = manifest.buckets
        self._data = data
        self._sums: list[int | Future[int] | None] = [None] * len(manifest.buckets)
        self._bucket = self._at = 0  # where the bytes that were copied end
        self._hash: xxhash.xxh3_64 | None = xxhash.xxh3_64()  # None: not all of this bucket came
        self._behind = 0  # buckets before this one have a checksum, or will

    def copied(self, start: int, block: memoryview) -> None:
        """Add the bytes that are copied from, or to, byte `start` on."""
        if not len(block):
            return
        if 0 < start - self._at < ALIGN_BYTES:
            self._add(self._data[self._at : start])  # padding, which nobody loads
        if start != self._at:
            while self._buckets[self._bucket][1] <= start:
                self._bucket += 1
            begins = start == self._buckets[self._bucket][0]
            self._at, self._hash = start, xxhash.xxh3_64() if begins else None
        self._add(block)

    def until(self, end: int) -> None:
        """Note that the first `end` bytes are in place; those that were not added are read."""
        while self._behind < len(self._sums) and self._buckets[self._behind][1] <= end:
            if self._sums[self._behind] is None:
                start, stop = self._buckets[self._behind]
                future = _threads().submit(checksum, self._data[start:stop])
                self._sums[self._behind] = future
            self._behind += 1

    def result(self) -> list[int]:
        """Return the checksum of every bucket, once all of the version is in place."""
        if 0 < len(self._data) - self._at < ALIGN_BYTES:
            self._add(self._data[self._at :])
        self.until(len(self._data))
        return [s.result() if isinstance(s, Future) else s for s in self._sums if s is not None]

    def _add(self, block: memoryview) -> None:
        while len(block):
            end = self._buckets[self._bucket][1]
            part = block[: end - self._at]
            if self._hash is not None:
                self._hash.update(part)
            self._at += len(part)
            block = block[len(part) :]
            if self._at == end:
                if self._hash is not None:
                    self._sums[self._bucket] = self._hash.intdigest()
                self._bucket += 1
                self._hash = xxhash.xxh3_64()


class SlotGuard:
    """A check that an engine loads the published version from a slot.

    Args:
        sequence: the sequence number of the slot, a view of one u64 in shared memory.
        check: raises an OSError or an error of ours if the memory is gone.
    """

    def __init__(
        self,
        sequence: memoryview,
        check: Callable[[], None],
        manifest: Manifest,
        data: memoryview,
        checksums: Sequence[int],
    ) -> None:
        self.sums = Checksums(manifest, data)  # of what the engine loads
        self.is_verified = False
        self._check = check
        self._sequence = sequence
        self._begun: int = sequence[0]
        self._manifest = manifest
        self._checksums = checksums

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
        """Raise ChangedError if the loaded bytes are not the version."""
        sums = self.sums.result()
        if self.is_overwritten:
            raise ChangedError(OVERWRITTEN)
        for bucket, (actual, wanted) in enumerate(zip(sums, self._checksums, strict=True)):
            if actual != wanted:
                raise ChangedError(wrong_checksum(self._manifest, bucket))
        self.is_verified = True


@cache
def _threads() -> ThreadPoolExecutor:
    threads = min(THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(threads, thread_name_prefix="umbra-checksums")
