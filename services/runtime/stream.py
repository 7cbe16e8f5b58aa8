"""Receiving without holding: for generators that have no memory for a second copy of the weights.

A version is verified where it lies, in the hub's arena, through a ring of a few buckets; the hub
keeps its slot until the engine has loaded it. Loading then goes through the ring again, bucket by
bucket, each verified once more before the engine sees it, the next one being read meanwhile. So
the pause contains the transfer, and a load that breaks off leaves weights that are neither the old
version nor the new one: the generator has to leave then. `staged` receiving has neither drawback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from umbra.proto.errors import PeerLostError, StartupError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.records import Manifest
from umbra.services.runtime.arena import ArenaReader, private_memory
from umbra.services.runtime.intake import Intaken
from umbra.services.runtime.manifest import checksum
from umbra.services.runtime.receiver import StagedVersion

LANES = 2  # one bucket is loaded while the next one is read


@dataclass(frozen=True, slots=True)
class ArenaVersion:
    """A version where it lies: in `slot` of the hub's arena at `path`.

    Iterating reads it: start and bytes of every bucket in order, each verified, good until the next
    one is asked for.

    Raises:
        PeerLostError: the version is not there any more.
    """

    path: str
    slot: int
    checksums: list[int]  # of each bucket
    read: Callable[[], Iterator[tuple[int, memoryview]]]

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        return self.read()


class StreamIntake:
    """The intake of a receiver that streams, over plane `shm`.

    Args:
        path: of the hub's arena.
        manifest: the layout.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._reader = ArenaReader(path, slot_bytes=manifest.total_bytes)
        largest = max(end - start for start, end in manifest.buckets)
        self._ring = [private_memory(largest) for _ in range(LANES)]
        self._verified: dict[int, Prepare] = {}  # by the number that stands for a buffer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-stream")

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> Intaken:
        """Verify every bucket; nothing is kept but where the version lies."""
        began = time.perf_counter()
        lane = private_memory(len(self._ring[0]))  # the ring itself may be loading right now
        for index in range(len(self._manifest.buckets)):
            try:
                self._read(message, index, lane)
            except (IndexError, OSError, StartupError, PeerLostError) as error:
                return Intaken(stage_s=time.perf_counter() - began, error=str(error))
            if interrupted():
                return Intaken(error="overtaken by a newer version")
        self._verified[target] = message
        return Intaken(stage_s=time.perf_counter() - began)

    def version(self, target: int) -> ArenaVersion:
        """The version that was taken as `target`."""
        message = self._verified[target]
        return ArenaVersion(
            self._path, message.slot, message.checksums, lambda: self._buckets(message)
        )

    def _buckets(self, message: Prepare) -> Iterator[tuple[int, memoryview]]:
        count = len(self._manifest.buckets)
        ahead = self._thread.submit(self._read, message, 0, self._ring[0])
        for index, (start, _) in enumerate(self._manifest.buckets):
            try:
                bucket = ahead.result()
            except (IndexError, OSError, StartupError) as error:
                raise PeerLostError(str(error)) from error
            if index + 1 < count:
                lane = self._ring[(index + 1) % LANES]
                ahead = self._thread.submit(self._read, message, index + 1, lane)
            yield start, bucket

    def close(self) -> None:
        """Close the arena."""
        self._thread.shutdown()
        self._reader.close()

    def _read(self, message: Prepare, index: int, lane: memoryview) -> memoryview:
        start, end = self._manifest.buckets[index]
        bucket = lane[: end - start]
        self._reader.read(message.slot, start, bucket)
        if checksum(bucket) != message.checksums[index]:
            raise PeerLostError(f"checksum of bucket {index} [{start}, {end}) is wrong")
        return bucket


class WeightStream:
    """What a generator keeps of the intake that its receiver has opened."""

    def __init__(self) -> None:
        self._intake: StreamIntake | None = None

    def open(self, reply: Subscribed) -> StreamIntake:
        """For `Receiver(open_intake=...)`."""
        self._intake = StreamIntake(reply.path, reply.manifest)
        return self._intake

    def buckets(self, staged: StagedVersion) -> ArenaVersion:
        """The buckets of `staged`, where they lie."""
        if self._intake is None:
            raise PeerLostError("the hub's arena is closed")
        return self._intake.version(staged.candidate.buffer)
