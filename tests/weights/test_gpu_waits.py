"""Work of a GPU that was begun is not done: each wait for it is taken away once, and missed."""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.gpu_world import GpuWorld
from fakes.hub_bench import LAYOUT, WAIT_S, content

from umbra.proto.errors import DeadlineError, PeerLostError
from umbra.proto.messages import Prepare
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import RING, GpuWorker, broadcast, chunks, result
from umbra.services.weights.manifest import checksums
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes import cuda_ipc
from umbra.services.weights.planes.cuda_ipc import IpcReceiver

SIZE, CHUNK = 40_000, 4096
SLOW_COPIES, SLOW_COLLECTIVES = "0.005,0", "0,0.005"


def looks_done(patch: pytest.MonkeyPatch) -> None:
    """The host waits for no event."""
    patch.setattr(cuda.CudaEvent, "done", True)


def collectives_go_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.Device, "mark_copies", lambda device: cuda.CudaEvent(device.copies))


def copies_go_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.Device, "mark_collectives", lambda d: cuda.CudaEvent(d.collectives))


def unchanged(patch: pytest.MonkeyPatch) -> None:
    pass


Change = Callable[[pytest.MonkeyPatch], None]


def through_a_ring(device: cuda.Device) -> list[int]:
    ring = [device.allocate(CHUNK) for _ in range(RING)]
    return [ring[index % RING] for index in range(len(chunks(SIZE, CHUNK)))]


def to_its_place(device: cuda.Device) -> list[int]:
    whole = device.allocate(SIZE)
    return [whole + start for start, _ in chunks(SIZE, CHUNK)]


@contextmanager
def joined(device: cuda.Device, uid: bytes, rank: int) -> Iterator[cuda.NcclCommunicator]:
    communicator = cuda.NcclCommunicator(device, 2, uid, rank)
    try:
        yield communicator
    finally:
        communicator.abort()


def transfer(
    device: cuda.Device,
    communicator: cuda.NcclCommunicator,
    memory: memoryview,
    places: list[int],
    *,
    sends: bool = False,
    deadline_s: float = WAIT_S,
) -> None:
    host, ranges = device.pin(memory), chunks(SIZE, CHUNK)
    broadcast(
        ranges, device, communicator, host=host, places=places, sends=sends, deadline_s=deadline_s
    )


@pytest.mark.parametrize("received", [through_a_ring, to_its_place])
@pytest.mark.parametrize(
    ("change", "delays"),
    [
        (unchanged, SLOW_COPIES),
        (unchanged, SLOW_COLLECTIVES),
        (looks_done, SLOW_COPIES),
        (looks_done, SLOW_COLLECTIVES),
        (collectives_go_ahead, SLOW_COPIES),
        (copies_go_ahead, SLOW_COLLECTIVES),
    ],
)
def test_a_broadcast(
    gpu_world: GpuWorld,
    monkeypatch: pytest.MonkeyPatch,
    received: Callable[[cuda.Device], list[int]],
    change: Change,
    delays: str,
) -> None:
    """The sender's memory is written again as soon as it says that it has sent."""
    monkeypatch.setenv("FAKE_CUDA_DELAYS", delays)
    version = content(1, SIZE)
    devices, uid = [cuda.Device(0), cuda.Device(0)], cuda.unique_id()
    change(monkeypatch)

    def end(rank: int) -> bytes:
        device, memory = devices[rank], private_memory(SIZE)
        if rank == 0:
            memory[:] = version
        places = (received if rank else through_a_ring)(device)
        with joined(device, uid, rank) as communicator:
            transfer(device, communicator, memory, places, sends=rank == 0)
            found = bytes(memory)
            if rank and received is to_its_place:  # the engine loads what lies there
                assert (ctypes.string_at(places[0], SIZE) == found) or change is not unchanged
            memory[:] = bytes(SIZE)
            device.drain()
            return found

    with ThreadPoolExecutor(2) as threads:
        _, found = threads.map(end, (0, 1))
    assert (found == version) == (change is unchanged)


@pytest.mark.parametrize(
    ("fault", "deadline_s", "error", "told"),
    [
        ("", 0.1, DeadlineError, r"chunk 0 of 10 was not broadcast within 0\.1 s"),
        ("error-bcast-hub", WAIT_S, PeerLostError, "so the test wants it"),
    ],
    ids=["deadline", "error"],  # WAIT_S differs between processes
)
def test_a_broadcast_that_fails_is_aborted_and_writes_nothing_any_more(
    gpu_world: GpuWorld,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    deadline_s: float,
    error: type[Exception],
    told: str,
) -> None:
    """Rank 0 is gone; or NCCL has an error, which is not waited for until the deadline."""
    monkeypatch.setenv("FAKE_CUDA_DELAYS", SLOW_COPIES)
    devices, uid, memory = [cuda.Device(0), cuda.Device(0)], cuda.unique_id(), private_memory(SIZE)
    places = through_a_ring(devices[1])
    for place in places[:RING]:
        ctypes.memset(place, 7, CHUNK)

    def receive() -> None:
        with joined(devices[1], uid, 1) as communicator:
            if fault:
                gpu_world.fault(fault)
            with pytest.raises(error, match=told):
                transfer(devices[1], communicator, memory, places, deadline_s=deadline_s)
            with pytest.raises(PeerLostError, match="was aborted"):
                communicator.check()

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        with joined(devices[0], uid, 0):
            pass
        receiving.result()
    memory[:] = bytes(SIZE)
    devices[1].drain()
    assert not any(memory), "it is filled in another way now"


@pytest.mark.parametrize("change", [unchanged, looks_done])
def test_an_upload(gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAYS", SLOW_COPIES)
    arena = Arena.anonymous(slot_bytes=SIZE, slots=2)
    arena.slot(1)[:] = content(1, SIZE)
    worker = GpuWorker(0)
    worker.attach(SIZE, CHUNK, os.dup(arena.fileno()))
    worker.export()
    change(monkeypatch)
    worker.upload(1, 10.0)
    there = ctypes.string_at(worker._exported + cuda.device_stride(SIZE), SIZE)
    assert (there == content(1, SIZE)) == (change is unchanged)
    worker._device.drain()


@pytest.mark.parametrize("change", [unchanged, looks_done])
def test_a_version_is_verified_where_it_was_read_back(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAYS", SLOW_COPIES)
    monkeypatch.setattr(cuda_ipc, "READ_BACK_BYTES", 8192)  # several groups, more than buffers
    version, hub = content(1), cuda.Device(0)
    memory = cuda.DeviceMemory(hub, LAYOUT.total_bytes)
    ctypes.memmove(memory.address, version, len(version))
    receiver = IpcReceiver(LAYOUT, 0)
    sums = checksums(LAYOUT, memoryview(bytearray(version)))
    change(monkeypatch)
    prepare = Prepare(epoch=1, version=1, slot=0, checksums=sums, memory=memory.handle)
    receipt = result(receiver.receive(prepare))
    assert ("checksum" in receipt.error) == (change is looks_done), receipt.error
    if change is unchanged:
        assert receipt.data is not None and bytes(receipt.data) == version
    receiver.close()


def test_memory_of_another_process_is_given_back_by_unmapping_it(gpu_world: GpuWorld) -> None:
    """As vLLM's worker maps what the generator has received; here both are one process."""
    device = cuda.Device(0)
    own = cuda.DeviceMemory(device, SIZE)
    ctypes.memmove(own.address, content(3, SIZE), SIZE)
    mapped = cuda.DeviceMemory(device, SIZE, own.handle)
    assert bytes(mapped) == content(3, SIZE)
    del mapped
    assert bytes(own) == content(3, SIZE)
    with pytest.raises(cuda.StartupError, match="cannot be mapped"):
        cuda.DeviceMemory(device, SIZE, b"memory-gone".ljust(64, b"\0"))


@pytest.mark.parametrize(
    ("built", "told"),
    [
        ("cuda: Optional[str] = '13.0'", "pip install 'umbra-rl[nccl-cuda13]'"),
        ("cuda: Optional[str] = '12.6'", "pip install 'umbra-rl[nccl]'"),
        ("cuda = '12.8'", "pip install 'umbra-rl[nccl]'"),
        ("cuda: Optional[str] = None", "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-"),
        ("", "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-"),  # no torch
    ],
)
def test_the_extra_is_that_of_torchs_cuda(
    built: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{built}\nhip = '13.9'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if built else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    found = cuda._to_install()
    assert found.startswith(told)
    assert "nvidia-nccl" not in found + cuda.NO_NCCL.partition("(")[0], "torch's own would go"
