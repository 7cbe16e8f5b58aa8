"""Plane `cuda_ipc`: the hub's device memory, mapped once, copied and verified on the same GPU.

The engine loads from the copy, which a hub that goes on cannot change. It is verified where CPUs
can see it, read back through two pinned buffers, beside decoding and not in a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

import msgspec

from umbra.proto.deadline import Pace
from umbra.proto.errors import PeerLostError, StartupError, UmbraError
from umbra.proto.messages import Prepare
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import CudaEvent, Device, DeviceMemory, GpuError, device_stride
from umbra.services.weights.gpu.worker import GpuWorkerProcess, reached, result
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.plane import OncePerVersion, Receipt, Receiving

READ_BACK_BYTES = 32 << 20  # read back at once
BUFFERS = 2  # one is verified while the next is read
COPY_DEADLINE_S = 30.0  # for a copy within a GPU, whose memory bounds it, and for each buffer
STUCK = "a copy on the GPU did not end"
FAILURES = 2  # uploads that may fail one after the other


class IpcHub(OncePerVersion):
    """The hub's end: uploads versions, and sends receivers their places.

    Slot i of the device memory is a copy of slot i of the arena, made for the first receiver of
    this plane; so the protocol's rule of when a slot may be written holds for it as well. An upload
    may take half of a phase of a push.
    """

    plane = "cuda_ipc"

    def __init__(
        self, worker: GpuWorkerProcess, pace: Pace, wake: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(wake)
        self.worker = worker
        self._pace = pace
        self._upload_s = pace.limit_s(0, parts=2)  # with a layout, for its bytes
        self._memory = b""
        self._failures = 0

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        super().layout(arena, manifest)
        self._upload_s = self._pace.limit_s(manifest.total_bytes, parts=2)
        self.worker.use(arena, arena.slot_bytes, self._pace)

    def close(self) -> None:
        """End the worker, and with it the memory, as soon as nobody has it mapped."""
        super().close()
        self.worker.kill()

    def _handle(self, prepare: Prepare) -> bytes:
        """Upload a version; return the handle of the device memory."""
        cancelled, limit_s = self._thread.cancelled.is_set, self._upload_s
        handle = result(self.worker.exported(), cancelled)
        self.worker.order("upload", slot=prepare.slot, deadline_s=limit_s)
        answer = self.worker.answer(2 * limit_s, abortable=False)  # once cancelled, it is killed
        result(answer, cancelled)
        return handle

    def _note(self, done: bytes | UmbraError) -> None:
        if isinstance(done, UmbraError):
            self._handled.clear()
            self._failures += 1
            if self._failures >= FAILURES:
                self.broken = f"the hub's GPU worker does not work: {done}"
            return
        self._failures = 0
        if done != self._memory:
            self._handled.clear()  # another memory than before
            self._memory = done

    def _complete(self, prepare: Prepare) -> Prepare:
        return msgspec.structs.replace(prepare, memory=self._memory)


class IpcReceiver:
    """The receiver's end: copies versions into its own memory on the same GPU, one at a time.

    StartupError if there is no such GPU, or too little of its memory."""

    def __init__(self, manifest: Manifest, device: int) -> None:
        self._manifest = manifest
        self._device = Device(device)
        self._memory = DeviceMemory(self._device, manifest.total_bytes)
        self._groups = list(_groups(manifest.buckets))
        largest = max(
            manifest.buckets[last][1] - manifest.buckets[first][0] for first, last in self._groups
        )
        self._buffers = [private_memory(largest) for _ in range(BUFFERS)]
        self._pinned = [self._device.pin(buffer) for buffer in self._buffers]
        self._hub: DeviceMemory | None = None  # its memory

    def receive(self, message: Prepare) -> Receiving:
        """Copy a version within the GPU and verify the copy."""
        began = copied = time.perf_counter()
        size, error, unusable = self._manifest.total_bytes, "", False
        try:
            if message.memory is None:
                raise PeerLostError("the hub sent no handle of its device memory")
            self._device.use()
            source = self._map(message.memory) + message.slot * device_stride(size)
            self._device.within(self._memory.address, source, size)
            yield from reached(self._device.mark_copies(), COPY_DEADLINE_S, STUCK)
            copied = time.perf_counter()
            yield from self._verify(message)
        except GpuError:
            raise
        except GeneratorExit:
            self._device.drain()  # nothing is under way when the buffer is used again
            raise
        except UmbraError as problem:
            self._device.drain()
            # Mapping fails for good where the hub's process is in another container, say.
            error, unusable = str(problem), isinstance(problem, StartupError)
        stage_s = time.perf_counter() - copied
        return Receipt(copied - began, stage_s, size, error, unusable=unusable, data=self._memory)

    def close(self) -> None:
        pinned, self._pinned = self._pinned, []
        with suppress(GpuError):  # the next use of the GPU raises it
            self._device.use()
            self._hub = None
            for address in pinned:
                self._device.unpin(address)

    def _map(self, handle: bytes) -> int:
        if self._hub is None or handle != self._hub.handle:  # it has another worker than before
            self._hub = None  # unmapped first
            self._hub = DeviceMemory(self._device, 0, handle)
        return self._hub.address

    def _verify(self, message: Prepare) -> Generator[int | None, None, None]:
        marks = [self._read_back(group) for group in range(min(BUFFERS, len(self._groups)))]
        for group, (first, last) in enumerate(self._groups):
            yield from reached(marks[group], COPY_DEADLINE_S, STUCK)
            buffer, base = self._buffers[group % BUFFERS], self._manifest.buckets[first][0]
            for bucket in range(first, last + 1):
                start, end = self._manifest.buckets[bucket]
                if checksum(buffer[start - base : end - base]) != message.checksums[bucket]:
                    raise PeerLostError(wrong_checksum(self._manifest, bucket))
                yield bucket
            if group + BUFFERS < len(self._groups):
                marks.append(self._read_back(group + BUFFERS))

    def _read_back(self, group: int) -> CudaEvent:
        first, last = self._groups[group]
        start, end = self._manifest.buckets[first][0], self._manifest.buckets[last][1]
        buffer = self._pinned[group % BUFFERS]
        self._device.to_host(buffer, self._memory.address + start, end - start)
        return self._device.mark_copies()


def _groups(buckets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last bucket of each run that is read back at once."""
    first = 0
    for index, (_, end) in enumerate(buckets):
        full = end - buckets[first][0] >= READ_BACK_BYTES
        if full or index + 1 == len(buckets):
            yield first, index
            first = index + 1
