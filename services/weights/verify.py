"""Checksums of a version while others may touch it: behind its writer, and behind its reader.

A receiver on the hub's host has no copy of a version: its engine loads it from the arena. Each slot
has a sequence number, odd while the slot is written. A load counts if the number is the same before
and after it, and if the checksums of the bytes, computed behind the load, are those that were
published: so neither a writer nor any other process that touched the memory goes unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from umbra.proto.errors import UmbraError
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import checksum, wrong_checksum

THREADS = 4  # at most, that verify what an engine loads

OVERWRITTEN = "its slot was written again"


class ChangedError(UmbraError):
    """A version changed while it was loaded: what was loaded is neither it nor another one."""


class ChecksumsBehind:
    """The checksums of a version, computed by threads behind whoever goes through its bytes.

    Args:
        executor: computes them.
        manifest: the layout.
        data: the version, `[manifest.total_bytes]`.
    """

    def __init__(self, executor: ThreadPoolExecutor, manifest: Manifest, data: memoryview) -> None:
        self._executor = executor
        self._buckets = manifest.buckets
        self._data = data
        self._sums: list[Future[int]] = []  # of the first buckets

    def until(self, end: int) -> None:
        """Compute those of the buckets within the first `end` bytes."""
        while len(self._sums) < len(self._buckets) and self._buckets[len(self._sums)][1] <= end:
            start, stop = self._buckets[len(self._sums)]
            self._sums.append(self._executor.submit(checksum, self._data[start:stop]))

    def result(self) -> list[int]:
        """Return the checksums of all buckets; computes what is left on this thread."""
        known = [future.result() for future in self._sums]
        return known + [checksum(self._data[i:j]) for i, j in self._buckets[len(known) :]]


class SlotGuard:
    """Tells whether what was read of a slot is the version that was published.

    Args:
        sequence: the sequence number of the slot, a view of one u64 in shared memory.
        check: raises an OSError or an error of ours if the memory is gone.
        manifest: the layout.
        data: the slot.
        checksums: of every bucket, as they were published.
    """

    def __init__(
        self,
        sequence: memoryview,
        check: Callable[[], None],
        manifest: Manifest,
        data: memoryview,
        checksums: Sequence[int],
    ) -> None:
        self._check = check
        self._sequence = sequence
        self._begun: int = sequence[0]
        self._manifest = manifest
        self._data = data
        self._checksums = checksums
        self._behind: ChecksumsBehind | None = None
        self.is_verified = False  # once all of it was read

    @property
    def is_overwritten(self) -> bool:
        """Return whether the slot is being written, or was since this guard was made."""
        now: int = self._sequence[0]
        return now != self._begun or now % 2 == 1

    @property
    def is_readable(self) -> bool:
        """Return whether the version is still there."""
        try:
            self._check()
        except (OSError, UmbraError):
            return False
        return not self.is_overwritten

    def read(self, end: int) -> None:
        """Note that the first `end` bytes were read: they are verified, all of them at the end.

        Raises:
            ChangedError: all were read, and they are not the version.
        """
        if self._behind is None:
            self._behind = ChecksumsBehind(_verifiers(), self._manifest, self._data)
        self._behind.until(end)
        if end < self._manifest.total_bytes:
            return
        behind, self._behind = self._behind, None
        sums = behind.result()
        if self.is_overwritten:
            raise ChangedError(OVERWRITTEN)
        for bucket, (actual, wanted) in enumerate(zip(sums, self._checksums, strict=True)):
            if actual != wanted:
                raise ChangedError(wrong_checksum(self._manifest, bucket))
        self.is_verified = True


@cache
def _verifiers() -> ThreadPoolExecutor:
    threads = min(THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(threads, thread_name_prefix="umbra-verify")
