"""Plane `shm`: engines load versions from the hub's arena in /dev/shm; nothing is copied before.

Staging maps the pages of a version, so that the load is one copy. It is verified once, behind the
load (`SlotGuard`): what was right before a load need not be what the engine read.
"""

from __future__ import annotations

import time

from umbra.proto.errors import StartupError
from umbra.proto.messages import Prepare, Subscribed
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving
from umbra.services.weights.verify import OVERWRITTEN, SlotGuard


class ShmHub(HubEnd):
    """The hub's end: receivers are told the arena's path when they subscribe, and read it."""

    plane = "shm"


class ShmReceiver:
    """Finds versions in the hub's arena.

    Args:
        reply: names the arena.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, reply: Subscribed) -> None:
        self._manifest = reply.manifest
        self._guards: dict[int, SlotGuard] = {}  # of the last version in each slot
        size = reply.manifest.total_bytes
        self._arena = Arena.attach(reply.path, slot_bytes=size, populate=False)

    def receive(self, message: Prepare) -> Receiving:
        """Map a version bucket by bucket; what was loaded and found wrong is verified first."""
        manifest, began = self._manifest, time.perf_counter()
        try:
            data = self._arena.slot(message.slot)
            sequence = self._arena.sequence(message.slot)
            guard = SlotGuard(sequence, self._arena.check, manifest, data, message.checksums)
            before = self._guards.get(message.slot)
            doubted = before is not None and before.is_verified is False and before.is_readable
            self._guards[message.slot] = guard
            for index, (start, end) in enumerate(manifest.buckets):
                self._arena.check()
                if doubted and checksum(data[start:end]) != message.checksums[index]:
                    guard.is_verified = False
                    return Receipt(error=wrong_checksum(manifest, index))
                self._arena.map_pages(message.slot, start, end)
                yield index
            if guard.is_overwritten:
                return Receipt(error=OVERWRITTEN)
        except (IndexError, OSError, StartupError) as problem:
            return Receipt(error=str(problem))
        return Receipt(stage_s=time.perf_counter() - began, data=data, guard=guard)

    def close(self) -> None:
        self._guards.clear()
        self._arena.close()
