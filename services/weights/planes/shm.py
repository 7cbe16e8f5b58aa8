"""Plane `shm`: engines load versions from the hub's arena in /dev/shm; nothing is copied before.

Staging verifies a version where it lies, which also maps its pages, so that the load is one copy.
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
    """The hub's end: receivers get the arena's path when they subscribe, and read it."""

    plane = "shm"


class ShmReceiver:
    """The receiver's end: verifies versions in the hub's arena.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, reply: Subscribed) -> None:
        self._manifest = reply.manifest
        size = reply.manifest.total_bytes
        self._arena = Arena.attach(reply.path, slot_bytes=size, populate=False)

    def receive(self, message: Prepare) -> Receiving:
        """Verify a version bucket by bucket."""
        manifest, began = self._manifest, time.perf_counter()
        try:
            data = self._arena.slot(message.slot)
            sequence = self._arena.sequence(message.slot)
            guard = SlotGuard(sequence, self._arena.check, manifest, data, message.checksums)
            for index, (start, end) in enumerate(manifest.buckets):
                self._arena.check()
                if checksum(data[start:end]) != message.checksums[index]:
                    return _failed(began, wrong_checksum(manifest, index))
                yield index
        except (IndexError, OSError, StartupError) as error:
            return _failed(began, str(error))
        if guard.is_overwritten:
            return _failed(began, OVERWRITTEN)
        return Receipt(stage_s=time.perf_counter() - began, data=data, guard=guard)

    def close(self) -> None:
        self._arena.close()


def _failed(began: float, error: str) -> Receipt:
    return Receipt(stage_s=time.perf_counter() - began, error=error)
