"""Plane `shm`: receivers copy from the hub's arena in /dev/shm, or load from it bucket by bucket.

What is verified is never the slot itself, which may change, but a private copy: of the whole
version where it is staged, of one bucket where it is streamed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from umbra.proto.errors import PeerLostError, StartupError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, largest_bucket, wrong_checksum
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving

LANES = 2  # one bucket is loaded while the next one is read
UNREADABLE = (IndexError, OSError, StartupError)


class ShmHub(HubEnd):
    """The hub's end: receivers are told the arena's path when they subscribe, and read it."""

    plane = "shm"


class ShmReceiver:
    """Copies versions into private memory.

    Args:
        reply: names the arena.
        buffers: to be filled, `[total_bytes]` each.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, reply: Subscribed, buffers: Sequence[memoryview]) -> None:
        self.versions = len(buffers)
        self._source = _Source(reply)
        self._buffers = buffers

    def receive(self, message: Prepare, target: int) -> Receiving:
        """Copy and verify bucket by bucket, while each is still in the cache."""
        data, manifest = self._buffers[target], self._source.manifest
        wire_s = stage_s = 0.0
        for index, (start, end) in enumerate(manifest.buckets):
            began = time.perf_counter()
            try:
                self._source.arena.read(message.slot, start, data[start:end])
            except UNREADABLE as error:
                return Receipt(wire_s, stage_s, start, str(error))
            copied = time.perf_counter()
            actual = checksum(data[start:end])
            wire_s += copied - began
            stage_s += time.perf_counter() - copied
            if actual != message.checksums[index]:
                return Receipt(wire_s, stage_s, end, wrong_checksum(manifest, index))
            yield index
        return Receipt(wire_s, stage_s, manifest.total_bytes, parts=lambda: iter((data,)))

    def close(self) -> None:
        """Unmap the arena."""
        self._source.arena.close()


class ShmStream:
    """Verifies versions where they lie, and reads them from there when they are loaded.

    Args:
        reply: names the arena.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    versions = 2

    def __init__(self, reply: Subscribed) -> None:
        self._source = _Source(reply)
        self._lane = private_memory(largest_bucket(reply.manifest))

    def receive(self, message: Prepare, target: int) -> Receiving:
        """Verify every bucket; nothing is kept."""
        began = time.perf_counter()
        source = self._source
        for index in range(len(source.manifest.buckets)):
            try:
                source.read(source.arena, message, index, self._lane)
            except (*UNREADABLE, PeerLostError) as error:
                return Receipt(stage_s=time.perf_counter() - began, error=str(error))
            yield None
        stage_s = time.perf_counter() - began
        return Receipt(stage_s=stage_s, parts=lambda: source.buckets(message))

    def close(self) -> None:
        """Unmap the arena, as soon as no load is under way."""
        self._source.close()


class _Source:
    """The hub's arena."""

    def __init__(self, reply: Subscribed) -> None:
        self.manifest: Manifest = reply.manifest
        self._path = reply.path
        self.arena = self._attached()
        self._lock = threading.Lock()
        self._loads = 0  # under way
        self._closed = False

    def read(self, arena: Arena, message: Prepare, index: int, lane: memoryview) -> memoryview:
        """A bucket, copied to the beginning of `lane` and verified there.

        Raises:
            PeerLostError: it is not what was published.
        """
        start, end = self.manifest.buckets[index]
        bucket = lane[: end - start]
        arena.read(message.slot, start, bucket)
        if checksum(bucket) != message.checksums[index]:
            raise PeerLostError(wrong_checksum(self.manifest, index))
        return bucket

    def buckets(self, message: Prepare) -> Iterator[memoryview]:
        """The buckets of a version in order; each is good until the next one is asked for.

        Raises:
            PeerLostError: the version is not there any more.
        """
        count = len(self.manifest.buckets)
        ring = [private_memory(largest_bucket(self.manifest)) for _ in range(LANES)]
        try:
            with self._loading() as arena, ThreadPoolExecutor(1, "umbra-stream") as ahead:
                coming = ahead.submit(self.read, arena, message, 0, ring[0])
                for index in range(count):
                    bucket = coming.result()
                    if index + 1 < count:
                        lane = ring[(index + 1) % LANES]
                        coming = ahead.submit(self.read, arena, message, index + 1, lane)
                    yield bucket
        except UNREADABLE as error:
            raise PeerLostError(str(error)) from error

    def close(self) -> None:
        """Unmap the arena; the last load under way does it, if there is one."""
        with self._lock:
            self._closed = True
            if not self._loads:
                self.arena.close()

    @contextmanager
    def _loading(self) -> Iterator[Arena]:
        """The arena, mapped until the load has ended.

        It is the mapping by which the version was verified: in another one every page would fault
        once more, in the pause. Only an old version that is loaded again after its end has been
        closed needs another one.
        """
        with self._lock:
            is_closed = self._closed
            self._loads += not is_closed
        if is_closed:
            with closing(self._attached()) as arena:
                yield arena
            return
        try:
            yield self.arena
        finally:
            with self._lock:
                self._loads -= 1
                if self._closed and not self._loads:
                    self.arena.close()

    def _attached(self) -> Arena:
        return Arena.attach(self._path, slot_bytes=self.manifest.total_bytes, populate=False)
