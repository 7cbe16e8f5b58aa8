"""The GPU's side with a double of CuPy: no wait for begun work is left out, no error is lost."""

import ctypes
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.cuda_double import machine
from fakes.gpu_world import GpuWorld, hub_worker
from fakes.hub_bench import LAYOUT, PACE, WAIT_S, content, publish, push
from fakes.slowness import until

from umbra.proto.errors import DeadlineError, PeerLostError, StartupError, UmbraError
from umbra.proto.messages import Prepare
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import (
    RING,
    GpuWorkerProcess,
    broadcast,
    chunks,
)
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.cuda_ipc import IpcHub

SIZE, CHUNK = 40_000, 4096
SLOW_COPIES, SLOW_COLLECTIVES = "0.005,0", "0,0.005"
ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"


def places(device: cuda.Device, *, in_a_ring: bool) -> list[int]:
    if in_a_ring:
        ring = [device.allocate(CHUNK) for _ in range(RING)]
        return [ring[index % RING] for index in range(len(chunks(SIZE, CHUNK)))]
    whole = device.allocate(SIZE)
    return [whole + start for start, _ in chunks(SIZE, CHUNK)]


@contextmanager
def joined(device: cuda.Device, uid: bytes, rank: int) -> Iterator[cuda.NcclCommunicator]:
    communicator = cuda.NcclCommunicator(device, 2, uid, rank)
    try:
        yield communicator
    finally:
        communicator.abort()


@pytest.mark.parametrize("in_a_ring", [True, False])
@pytest.mark.parametrize("delays", [SLOW_COPIES, SLOW_COLLECTIVES])
def test_a_broadcast(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, in_a_ring: bool, delays: str
) -> None:
    """The sender's memory is written again as soon as it says that it has sent."""
    monkeypatch.setenv("FAKE_CUDA_DELAYS", delays)
    version = content(1, SIZE)
    devices, uid = [cuda.Device(0), cuda.Device(0)], cuda.unique_id()

    def end(rank: int) -> bytes:
        device, memory = devices[rank], private_memory(SIZE)
        if rank == 0:
            memory[:] = version
        at, host = places(device, in_a_ring=in_a_ring or rank == 0), device.pin(memory)
        how = {"host": host, "places": at, "sends": rank == 0, "deadline_s": WAIT_S}
        with joined(device, uid, rank) as communicator:
            broadcast(chunks(SIZE, CHUNK), device, communicator, **how)
            found = bytes(memory)
            if rank and not in_a_ring:
                assert ctypes.string_at(at[0], SIZE) == found, "the engine loads what lies there"
            memory[:] = bytes(SIZE)
            device.drain()
            return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(end, (0, 1))) == [version, version]


def test_a_broadcast_that_fails_is_aborted_and_writes_nothing_any_more(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is gone."""
    monkeypatch.setenv("FAKE_CUDA_DELAYS", SLOW_COPIES)
    (other, device), uid, memory = map(cuda.Device, (0, 0)), cuda.unique_id(), private_memory(SIZE)
    at, host = places(device, in_a_ring=True), device.pin(memory)
    for place in at[:RING]:
        ctypes.memset(place, 7, CHUNK)
    how = {"host": host, "places": at, "sends": False, "deadline_s": 0.1}

    def receive() -> None:
        with joined(device, uid, 1) as communicator:
            with pytest.raises(DeadlineError, match="chunk 0 of 10 was not broadcast"):
                broadcast(chunks(SIZE, CHUNK), device, communicator, **how)
            with pytest.raises(PeerLostError, match="was aborted"):
                communicator.check()

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        with joined(other, uid, 0):
            pass
        receiving.result()
    memory[:] = bytes(SIZE)
    device.drain()
    assert not any(memory), "it is filled in another way now"


def test_memory_of_another_process_is_given_back_by_unmapping_it(gpu_world: GpuWorld) -> None:
    """As vLLM's worker maps what the generator has received; here both are one process."""
    device = cuda.Device(0)
    own = cuda.DeviceMemory(device, SIZE)
    ctypes.memmove(own.address, content(3, SIZE), SIZE)
    mapped = cuda.DeviceMemory(device, SIZE, own.handle)
    assert bytes(mapped) == content(3, SIZE)
    del mapped
    assert bytes(own) == content(3, SIZE)
    with pytest.raises(StartupError, match="cannot be mapped"):
        cuda.DeviceMemory(device, SIZE, b"memory-gone".ljust(64, b"\0"))


# -- errors ---------------------------------------------------------------------------------------


def test_a_cuda_error_in_a_receiver_ends_it(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A version is served. 2. The copy of the next one breaks CUDA. Result: a failure."""
    gpu_world.start("cuda_ipc")
    publisher, receiver = gpu_world.bench.publisher(), gpu_world.receiver("gen-0", "cuda_ipc")
    push(publisher, 0, receiver)
    monkeypatch.setattr(machine, "name", lambda: "this-process")
    monkeypatch.setattr(machine, "broken", 0)  # as before, in the end
    gpu_world.fault("break-copy-this-process")
    publish(publisher, 1)
    receiver._thread.join(WAIT_S)
    with pytest.raises(cuda.GpuError, match=f"{ILLEGAL}$") as caught:
        receiver.check()
    assert caught.value.exit_code == 6
    receiver.close()  # does not raise, and neither does whoever frees its memory


def test_a_worker_whose_cuda_is_broken_is_another_one_the_next_time(gpu_world: GpuWorld) -> None:
    gpu_world.start("cuda_ipc")
    publisher, receiver = gpu_world.bench.publisher(), gpu_world.receiver("gen-0", "cuda_ipc")
    push(publisher, 0, receiver)
    before = hub_worker(gpu_world.bench, "cuda_ipc")
    gpu_world.fault("break-copy-hub")
    push(publisher, 1, receiver)
    assert hub_worker(gpu_world.bench, "cuda_ipc") != before


def test_a_worker_that_hangs_is_killed_and_another_serves(gpu_world: GpuWorld) -> None:
    worker = GpuWorkerProcess(0)
    gpu_world.bench.closers.append(worker.kill)
    with pytest.raises(DeadlineError, match="no answer from the GPU worker"):
        worker.call("join", 0.1, epoch=1, uid=cuda.unique_id().hex(), rank=0, size=2)
    assert worker.pid is None
    with pytest.raises(UmbraError, match="GPU worker: no such order"):
        worker.call("dance", WAIT_S)
    assert worker.starts == 2 and worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="ended"):
        worker.call("facts", WAIT_S)


def test_who_closes_waits_for_no_upload(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The worker hangs in an upload. 2. The hub ends."""
    monkeypatch.setenv("FAKE_CUDA_DELAYS", "1000")
    worker = GpuWorkerProcess(0)
    hub = IpcHub(worker, PACE)
    hub.layout(Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=2), LAYOUT)
    hub.prepare("a", Prepare(epoch=1, version=0, slot=0, checksums=[0]), 0.0)
    assert hub.poll(0.0) == []
    until(lambda: worker.memory is not None, lambda: worker.pid)
    began = time.monotonic()
    hub.close()
    assert time.monotonic() - began < WAIT_S / 2 <= PACE.limit_s(0) / 2
    assert worker.pid is None


def test_every_method_of_a_device_raises_ours(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda.Device(0)
    address = device.allocate(64)
    mark = device.mark_copies()
    memory = memoryview(bytearray(8))
    monkeypatch.setattr(machine, "broken", 700)
    calls = [
        ("use",), ("free", address), ("unpin", 0), ("to_device", address, 0, 8),
        ("to_host", 0, address, 8), ("within", address, address, 8), ("mark_copies",),
        ("mark_collectives",), ("drain",), ("export", address), ("close", address),
    ]  # fmt: skip
    starts = [("allocate", 8), ("open", bytes(64)), ("pin", memory)]
    for kind, failing in ((cuda.GpuError, calls), (StartupError, starts)):
        for name, *arguments in failing:
            with pytest.raises(kind, match=ILLEGAL):
                getattr(device, name)(*arguments)
                pytest.fail(name)
    with pytest.raises(cuda.GpuError, match=ILLEGAL):
        _ = mark.done
    with pytest.raises(StartupError, match=ILLEGAL):
        cuda.Device(1)


def test_device_memory_is_asked_for_before_it_is_taken(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda.Device(0)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "99")
    monkeypatch.setattr(gpu_world.runtime, "malloc", lambda _size: pytest.fail("taken"))
    with pytest.raises(StartupError, match="no room for 100 bytes of weights, 99 are free"):
        device.allocate(100)


def test_a_gpu_that_lets_in_one_process_is_named(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_COMPUTE_MODE", "3")
    told = "compute mode exclusive-process.*nvidia-smi -i 1 -c DEFAULT"
    with pytest.raises(StartupError, match=told):
        cuda.facts(1)


@pytest.fixture
def communicator(gpu_world: GpuWorld) -> cuda.NcclCommunicator:
    return cuda.NcclCommunicator(cuda.Device(0), 1, os.urandom(128), 0)


@pytest.mark.parametrize(
    ("state", "said"), [(6, "NCCL_ERROR_REMOTE_ERROR"), (7, ""), (8, "NCCL_TIMEOUT"), (9, "9")]
)
def test_what_nccl_says_is_a_lost_peer(
    communicator: cuda.NcclCommunicator, monkeypatch: pytest.MonkeyPatch, state: int, said: str
) -> None:
    """Also those states for which CuPy has no text; but 7, in progress, is no error."""
    communicator.check()
    monkeypatch.setenv("FAKE_NCCL_STATE", str(state))
    with pytest.raises(PeerLostError, match=f"NCCL: {said}") if said else nullcontext():
        communicator.check()
    assert communicator.abort()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_an_abort_that_comes_to_nothing_is_none(
    gpu_world: GpuWorld,
    communicator: cuda.NcclCommunicator,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Or a call of another thread hangs in NCCL. Then the process has to go."""
    monkeypatch.setattr(cuda, "ABORT_DEADLINE_S", 0.1)
    if how == "hangs":
        with communicator._entering:
            assert not communicator.abort()
        assert communicator.abort()
        return
    abort = gpu_world.nccl.NcclCommunicator.abort

    def fail(self: object) -> None:
        abort(self)
        raise KeyError(8)

    monkeypatch.setattr(gpu_world.nccl.NcclCommunicator, "abort", fail)
    assert not communicator.abort()


def test_an_abort_waits_for_the_call_that_is_in_nccl(
    gpu_world: GpuWorld, communicator: cuda.NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort frees the communicator, which `check` and `bcast` of another thread would use."""
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []
    kind = gpu_world.nccl.NcclCommunicator
    abort = kind.abort

    def check(_self: object) -> None:
        inside.set()
        assert leave.wait(WAIT_S)
        order.append("checked")

    def aborted(self: object) -> None:
        order.append("aborted")
        abort(self)

    monkeypatch.setattr(kind, "check_async_error", check)
    monkeypatch.setattr(kind, "abort", aborted)
    monkeypatch.setattr(cuda, "ABORT_DEADLINE_S", WAIT_S)
    with ThreadPoolExecutor(2) as threads:
        checking = threads.submit(communicator.check)
        assert inside.wait(WAIT_S)
        aborting = threads.submit(communicator.abort)
        with pytest.raises(TimeoutError):
            aborting.result(0.05)  # as much as it needs where nothing holds it up
        assert order == []
        leave.set()
        checking.result(WAIT_S)
        assert aborting.result(WAIT_S)
    assert order == ["checked", "aborted"]
    with pytest.raises(PeerLostError, match="was aborted"):
        communicator.check()


@pytest.mark.parametrize(
    ("built", "extra"), [("cuda = '13.0'", "nccl-cuda13"), ("cuda: str = '12.8'", "nccl"), ("", "")]
)
def test_the_extra_is_that_of_torchs_cuda(
    built: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are named where there is no torch, or it has no CUDA."""
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{built}\nhip = '13.9'\n")
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for spec in (origin,) if built else (origin, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, spec=spec: spec)
        both = "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-cuda13] for CUDA 13"
        assert cuda._to_install() == (f"pip install 'umbra-rl[{extra}]'" if extra else both)
