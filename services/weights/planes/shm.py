"""Plane `shm`: receivers copy versions from the hub's arena in /dev/shm.

The private copy is verified, never the slot itself, which may be overwritten meanwhile.
"""

from __future__ import annotations

import time

from umbra.proto.errors import StartupError
from umbra.proto.messages import Prepare, Subscribed
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving


class ShmHub(HubEnd):
    """The hub's end: receivers are told the arena's path when they subscribe, and read it."""

    plane = "shm"


class ShmReceiver:
    """Copies versions into private memory.

    Args:
        reply: names the arena.
        data: to be filled, `[total_bytes]`.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, reply: Subscribed, data: memoryview) -> None:
        self._manifest = reply.manifest
        size = reply.manifest.total_bytes
        self._arena = Arena.attach(reply.path, slot_bytes=size, populate=False)
        self._data = data

    def receive(self, message: Prepare) -> Receiving:
        """Copy and verify bucket by bucket, while each is still in the cache."""
        data, manifest = self._data, self._manifest
        wire_s = stage_s = 0.0
        for index, (start, end) in enumerate(manifest.buckets):
            began = time.perf_counter()
            try:
                self._arena.read(message.slot, start, data[start:end])
            except (IndexError, OSError, StartupError) as error:
                return Receipt(wire_s, stage_s, start, str(error))
            copied = time.perf_counter()
            actual = checksum(data[start:end])
            wire_s += copied - began
            stage_s += time.perf_counter() - copied
            if actual != message.checksums[index]:
                return Receipt(wire_s, stage_s, end, wrong_checksum(manifest, index))
            yield index
        return Receipt(wire_s, stage_s, manifest.total_bytes, data=data)

    def close(self) -> None:
        self._arena.close()
