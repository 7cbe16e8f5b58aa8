"""Plane `shm`: engines load versions from the hub's arena in /dev/shm; nothing is copied before.

The hub verifies a version where it lies, once for all receivers of its host. They map its pages
while they stage it, so that the load is one copy.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

from umbra.proto.errors import PeerLostError, StartupError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.planes.plane import Background, OncePerVersion, Receipt, Receiving
from umbra.services.weights.verify import OVERWRITTEN, THREADS, Checksums, SlotGuard


class ShmHub(OncePerVersion):
    """The hub's end: receivers get the arena's path when they subscribe, and verified versions."""

    plane = "shm"

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        super().__init__(Background("umbra-shm", wake))
        self._layout: tuple[Arena, Manifest] | None = None

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        super().layout(arena, manifest)
        self._layout = arena, manifest

    def handle(self, prepare: Prepare) -> bytes:
        """Verify a version where it lies."""
        assert self._layout is not None
        arena, manifest = self._layout
        sums = Checksums(manifest, arena.slot(prepare.slot), THREADS)
        for _, end in manifest.buckets:
            if self._thread.cancelled.is_set():
                raise PeerLostError("given up while it was verified")
            sums.until(end)
        if wrong := sums.wrong(prepare.checksums):
            raise PeerLostError(wrong)
        return b""


class ShmReceiver:
    """The receiver's end: maps versions in the hub's arena.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, reply: Subscribed) -> None:
        self._manifest = reply.manifest
        self._mapped: set[int] = set()  # slots
        size = reply.manifest.total_bytes
        self._arena = Arena.attach(reply.path, slot_bytes=size, populate=False)

    def receive(self, message: Prepare) -> Receiving:
        """Map a version bucket by bucket, the first time that its slot is used."""
        manifest, began = self._manifest, time.perf_counter()
        error, guard, data = "", None, None
        try:
            data = self._arena.slot(message.slot)
            sequence = self._arena.sequence(message.slot)
            guard = SlotGuard(sequence, self._arena.check, manifest, data, message.checksums)
            for index, (start, end) in enumerate(manifest.buckets):
                self._arena.check()
                if message.slot not in self._mapped:
                    bytes(data[start : end : mmap.PAGESIZE])
                yield index
            self._mapped.add(message.slot)
            error = OVERWRITTEN if guard.is_overwritten else ""
        except (IndexError, OSError, StartupError) as problem:
            error = str(problem)
        stage_s = time.perf_counter() - began
        if error:
            return Receipt(stage_s=stage_s, error=error)
        return Receipt(stage_s=stage_s, data=data, guard=guard)

    def close(self) -> None:
        self._arena.close()
