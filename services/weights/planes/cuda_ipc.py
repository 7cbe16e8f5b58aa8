"""Plane `cuda_ipc`: the hub's device memory, mapped once, copied and verified on the same GPU.

The engine loads from the copy, so that a hub that goes on (or is restarted) cannot change a version
under its hands. The copy is verified where CPUs can see it: it is read back through two pinned
lanes, which costs its bytes over the bus and one thread's xxh3, beside decoding and not in a pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from umbra.proto.deadline import Deadline, Pace
from umbra.proto.errors import PeerLostError, StartupError, UmbraError
from umbra.proto.messages import Prepare, Subscribe
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import (
    CudaEvent,
    Device,
    DeviceMemory,
    GpuError,
    device_stride,
)
from umbra.services.weights.gpu.worker import POLL_S, START_S, GpuWorkerProcess, result
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.plane import (
    Background,
    HubEnd,
    Receipt,
    Receiving,
    Settled,
)

LANE_BYTES = 32 << 20  # read back at once
LANES = 2  # one is verified while the next is read
COPY_DEADLINE_S = 30.0  # for a copy within a GPU, whose memory bounds it, and for each lane
FAILURES = 2  # uploads that may fail one after the other

log = logging.getLogger(__name__)

Content = tuple[int, Sequence[int]]  # slot, and checksum of every bucket


class IpcHub(HubEnd):
    """The hub's end: uploads versions, and sends receivers their places.

    Slot i of the device memory is a copy of slot i of the arena, made when the first receiver of
    this plane is to get what lies there; so the protocol's rule of when a slot may be written holds
    for it as well.

    Args:
        pace: of a phase of a push, half of which an upload may take.
    """

    plane = "cuda_ipc"

    def __init__(self, worker: GpuWorkerProcess, pace: Pace) -> None:
        self.worker = worker
        self._pace = pace
        self._upload_s = pace.limit_s(0, parts=2)  # with a layout, for its bytes
        self._thread: Background[bytes] = Background("umbra-cuda-ipc")
        self._handle = b""
        self._exported_by = 0  # which start of the worker made the handle
        self._waiting: dict[str, Prepare] = {}
        self._there: dict[int, Sequence[int]] = {}  # by slot the checksums of the uploaded version
        self._uploading: Content | None = None
        self._failures = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._thread.busy

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._thread.wait()
        self._thread.take()
        self._uploading = None
        self._there.clear()
        self._upload_s = self._pace.limit_s(manifest.total_bytes, parts=2)
        self.worker.use(arena, arena.slot_bytes, self._pace)

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        self.left(name)

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Settled]:
        self._waiting[name] = prepare
        return ()

    def left(self, name: str) -> None:
        self._waiting.pop(name, None)

    def granted(self, slot: int) -> None:
        self._there.pop(slot, None)
        if self._uploading is not None and self._uploading[0] == slot:
            self._uploading = None  # its bytes may be of two versions

    def poll(self, now: float) -> list[Settled]:
        """Return the Prepares whose version is on the GPU, or could not get there."""
        outcomes: list[Settled] = []
        done = self._thread.take()
        if done is not None:
            outcomes += self._uploaded(done)
        for name, prepare in list(self._waiting.items()):
            if self._there.get(prepare.slot) == prepare.checksums:
                del self._waiting[name]
                outcomes.append(
                    Settled(name, msgspec.structs.replace(prepare, memory=self._handle))
                )
        if self._waiting and not self._thread.busy:
            prepare = next(iter(self._waiting.values()))
            self._uploading = (prepare.slot, prepare.checksums)
            self._thread.start(lambda: self._upload(prepare.slot))
        return outcomes

    def close(self) -> None:
        """End the worker, and with it the memory, as soon as nobody has it mapped."""
        self._thread.close()
        self.worker.kill()

    def _uploaded(self, done: bytes | UmbraError) -> list[Settled]:
        uploading, self._uploading = self._uploading, None
        if isinstance(done, UmbraError):
            self._there.clear()
            self._failures += 1
            if self._failures >= FAILURES:
                self.broken = f"the hub's GPU worker does not work: {done}"
            log.warning("plane cuda_ipc: %s", done)
            failed, self._waiting = self._waiting, {}
            return [Settled(name, prepare, str(done)) for name, prepare in failed.items()]
        self._failures = 0
        if done != self._handle:
            self._there.clear()  # another memory than before
            self._handle = done
        if uploading is not None:
            self._there[uploading[0]] = uploading[1]
        return []

    def _upload(self, slot: int) -> bytes:
        """Upload `slot` on the thread; returns the handle of the device memory."""
        handle = self._handle
        result(self.worker.attached())
        if self.worker.starts != self._exported_by:
            handle = bytes.fromhex(self.worker.call("export", START_S)["handle"])
            self._exported_by = self.worker.starts
        self.worker.call("upload", self._upload_s * 2, slot=slot, deadline_s=self._upload_s)
        return handle


class IpcReceiver:
    """The receiver's end: copies versions into its own memory on the same GPU, one at a time.

    Raises:
        StartupError: there is no such GPU, or too little of its memory.
    """

    def __init__(self, manifest: Manifest, device: int) -> None:
        self._manifest = manifest
        self._device = Device(device)
        self._memory = DeviceMemory(self._device, manifest.total_bytes)
        self._groups = list(_groups(manifest.buckets))
        largest = max(
            manifest.buckets[last][1] - manifest.buckets[first][0] for first, last in self._groups
        )
        self._lanes = [private_memory(largest) for _ in range(LANES)]
        self._pinned = [self._device.pin(lane) for lane in self._lanes]
        self._hub: tuple[bytes, DeviceMemory] | None = None  # its memory, by the handle

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
            yield from _done(self._device.mark_copies())
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
        if self._hub is None or handle != self._hub[0]:  # the hub's worker is another than before
            self._hub = None  # unmapped first
            self._hub = handle, DeviceMemory(self._device, 0, handle)
        return self._hub[1].address

    def _verify(self, message: Prepare) -> Generator[int | None, None, None]:
        marks = [self._read_back(group) for group in range(min(LANES, len(self._groups)))]
        for group, (first, last) in enumerate(self._groups):
            yield from _done(marks[group])
            lane, base = self._lanes[group % LANES], self._manifest.buckets[first][0]
            for bucket in range(first, last + 1):
                start, end = self._manifest.buckets[bucket]
                if checksum(lane[start - base : end - base]) != message.checksums[bucket]:
                    raise PeerLostError(wrong_checksum(self._manifest, bucket))
                yield bucket
            if group + LANES < len(self._groups):
                marks.append(self._read_back(group + LANES))

    def _read_back(self, group: int) -> CudaEvent:
        first, last = self._groups[group]
        start, end = self._manifest.buckets[first][0], self._manifest.buckets[last][1]
        lane = self._pinned[group % LANES]
        self._device.to_host(lane, self._memory.address + start, end - start)
        return self._device.mark_copies()


def _done(mark: CudaEvent) -> Generator[None, None, None]:
    """Wait until the GPU has come to `mark`."""
    deadline = Deadline(COPY_DEADLINE_S, "a copy on the GPU did not end")
    while not mark.done:
        deadline.check()
        yield
        time.sleep(POLL_S)


def _groups(buckets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last bucket of each run that is read back at once."""
    first = 0
    for index, (_, end) in enumerate(buckets):
        full = end - buckets[first][0] >= LANE_BYTES
        if full or index + 1 == len(buckets):
            yield first, index
            first = index + 1
