"""Plane `cuda_ipc`: the hub's device memory, mapped once, copied and verified on the same GPU.

The engine loads from the copy, so that a hub that goes on (or is restarted) cannot change a version
under its hands. The copy is verified where CPUs can see it: it is read back through two pinned
lanes, which costs its bytes over the bus and one thread's xxh3, beside decoding and not in a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from umbra.proto.errors import DeadlineError, PeerLostError, StartupError, UmbraError
from umbra.proto.messages import Prepare
from umbra.proto.records import Manifest
from umbra.services.runtime.gpu.broadcast import POLL_S
from umbra.services.runtime.gpu.cuda import (
    CudaEvent,
    Device,
    DeviceMemory,
    GpuError,
    device_stride,
)
from umbra.services.runtime.weights.manifest import checksum
from umbra.services.runtime.weights.memory import private_memory
from umbra.services.runtime.weights.plane_reader import ReadResult

LANE_BYTES = 32 << 20  # read back at once
LANES = 2  # one is verified while the next is read
COPY_DEADLINE_S = 30.0  # for the copy, and for each lane


class IpcReader:
    """Copies versions into `memory`, one at a time.

    Args:
        manifest: the layout.
        memory: a version's place on this process's GPU.

    Raises:
        StartupError: there is no such GPU, or too little of its memory.
    """

    def __init__(self, manifest: Manifest, memory: DeviceMemory) -> None:
        self._manifest = manifest
        self._memory = memory
        self._device = memory.device
        self._groups = list(_groups(manifest.buckets))
        largest = max(
            manifest.buckets[last][1] - manifest.buckets[first][0] for first, last in self._groups
        )
        self._lanes = [private_memory(largest) for _ in range(LANES)]
        self._pinned = [self._device.pin(lane) for lane in self._lanes]
        self._handle = b""
        self._mapped = 0

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Copy a version inside of the GPU and verify the copy.

        Raises:
            GpuError: CUDA failed in this process, which is of no more use.
        """
        began = copied = time.perf_counter()
        size, error, unusable = self._manifest.total_bytes, "", False
        try:
            if message.memory is None:
                raise PeerLostError("the hub sent no handle of its device memory")
            self._device.use()
            source = self._map(message.memory) + message.slot * device_stride(size)
            self._device.within(self._memory.address, source, size)
            self._wait(self._device.mark_copies(), interrupted)
            copied = time.perf_counter()
            self._verify(message, interrupted)
        except GpuError:
            raise
        except UmbraError as problem:
            self._device.drain()  # nothing is under way when the buffer is used again
            # Mapping fails for good where the hub's process is in another container, say.
            error, unusable = str(problem), isinstance(problem, StartupError)
        stage_s = time.perf_counter() - copied
        return ReadResult(copied - began, stage_s, size, error, unusable=unusable)

    def close(self) -> None:
        """Unmap the hub's memory."""
        pinned, self._pinned = self._pinned, []
        with suppress(GpuError):  # whoever uses the GPU next hears of it
            self._device.use()
            self._unmap()
            for address in pinned:
                self._device.unpin(address)

    def _map(self, handle: bytes) -> int:
        if handle != self._handle:  # the hub's agent is another one than before
            self._unmap()
            self._mapped = self._device.open(handle)
            self._handle = handle
        return self._mapped

    def _unmap(self) -> None:
        if self._handle:
            self._device.close(self._mapped)
            self._handle = b""

    def _verify(self, message: Prepare, interrupted: Callable[[], bool]) -> None:
        marks = [self._read_back(group) for group in range(min(LANES, len(self._groups)))]
        for group, (first, last) in enumerate(self._groups):
            self._wait(marks[group], interrupted)
            lane, base = self._lanes[group % LANES], self._manifest.buckets[first][0]
            for bucket in range(first, last + 1):
                start, end = self._manifest.buckets[bucket]
                if checksum(lane[start - base : end - base]) != message.checksums[bucket]:
                    raise PeerLostError(f"checksum of bucket {bucket} [{start}, {end}) is wrong")
            if group + LANES < len(self._groups):
                marks.append(self._read_back(group + LANES))

    def _read_back(self, group: int) -> CudaEvent:
        first, last = self._groups[group]
        start, end = self._manifest.buckets[first][0], self._manifest.buckets[last][1]
        lane = self._pinned[group % LANES]
        self._device.to_host(lane, self._memory.address + start, end - start)
        return self._device.mark_copies()

    def _wait(self, mark: CudaEvent, interrupted: Callable[[], bool]) -> None:
        until = time.monotonic() + COPY_DEADLINE_S
        while not mark.done:
            if interrupted():
                raise PeerLostError("given up while it was copied")
            if time.monotonic() >= until:
                raise DeadlineError(f"a copy on the GPU took more than {COPY_DEADLINE_S:g} s")
            time.sleep(POLL_S)


def _groups(buckets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and last bucket of each run of buckets that is read back at once."""
    first = 0
    for index, (_, end) in enumerate(buckets):
        full = end - buckets[first][0] >= LANE_BYTES
        if full or index + 1 == len(buckets):
            yield first, index
            first = index + 1


def open_memory(device: int, size: int) -> DeviceMemory:
    """Memory for one version on GPU `device`, for this process.

    Raises:
        StartupError: there is too little.
    """
    return DeviceMemory(Device(device), size)
