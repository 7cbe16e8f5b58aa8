"""How the bytes of a version get into a receiver's memory: one intake for each plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from umbra.proto.errors import StartupError
from umbra.proto.messages import Prepare
from umbra.proto.records import Manifest
from umbra.services.runtime.weights.arena import Arena
from umbra.services.runtime.weights.manifest import checksum


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of one version: seconds of transfer and of verifying, and what went wrong.

    `unusable`: this plane will never work between the hub and us.
    """

    wire_s: float = 0.0
    stage_s: float = 0.0
    wire_bytes: int = 0
    error: str = ""
    source_lost: bool = False
    unusable: bool = False


class PlaneReader(Protocol):
    """Fills one of the receiver's buffers with a version, and verifies every bucket there."""

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Bring the version that `message` names into buffer `target`.

        `interrupted` tells, from time to time, that nobody wants it any longer.
        """
        ...

    def close(self) -> None:
        """Let go of files and sockets."""
        ...


class ArenaReader:
    """Plane `shm`: copies from the hub's arena.

    Args:
        path: of the arena.
        manifest: the layout.
        buffers: to be filled, `[manifest.total_bytes]` each.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, path: str, manifest: Manifest, buffers: Sequence[memoryview]) -> None:
        self._manifest = manifest
        self._buffers = buffers
        self._arena = Arena.attach(path, slot_bytes=manifest.total_bytes, populate=False)

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Copy and verify bucket by bucket, while each is still in the cache.

        It is the private copy that is verified: the slot may change, the copy can't.
        """
        data = self._buffers[target]
        wire_s = stage_s = 0.0
        for index, (start, end) in enumerate(self._manifest.buckets):
            began = time.perf_counter()
            try:
                self._arena.read(message.slot, start, data[start:end])
            except (IndexError, OSError, StartupError) as error:
                return ReadResult(wire_s, stage_s, start, str(error))
            copied = time.perf_counter()
            actual = checksum(data[start:end])
            wire_s += copied - began
            stage_s += time.perf_counter() - copied
            if actual != message.checksums[index]:
                error = f"checksum of bucket {index} [{start}, {end}) is wrong"
                return ReadResult(wire_s, stage_s, end, error)
        return ReadResult(wire_s, stage_s, self._manifest.total_bytes)

    def close(self) -> None:
        """Unmap the arena."""
        self._arena.close()
