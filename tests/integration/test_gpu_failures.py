"""Errors of CUDA and NCCL reach everyone as an error of ours, and end who can't go on.

All is real but CuPy, whose double raises what CuPy does.
"""

import os
import threading
from contextlib import nullcontext

import pytest
from fakes.cuda_double import machine
from fakes.gpu_world import GpuWorld, hub_worker
from fakes.hub_bench import WAIT_S, publish, push, take

from umbra.proto.errors import PeerLostError, StartupError, UmbraError
from umbra.services.weights.gpu import cuda
from umbra.services.weights.receiver import Receiver

ILLEGAL = "cudaErrorIllegalAddress: an illegal memory access was encountered"


def failure(receiver: Receiver) -> UmbraError:
    """Why no more versions come."""
    receiver._thread.join(WAIT_S)
    with pytest.raises(UmbraError) as caught:
        receiver.check()
    return caught.value


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
    error = failure(receiver)
    assert isinstance(error, cuda.GpuError)
    assert error.exit_code == 6
    assert str(error).endswith(ILLEGAL)
    receiver.close()  # does not raise, and neither does whoever frees its memory


def test_one_while_memory_is_pinned_costs_the_plane(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_world.start("auto")
    publisher = gpu_world.bench.publisher()
    from cupy.cuda import runtime

    def refuse(*_args: int) -> None:
        raise runtime.CUDARuntimeError(2)

    monkeypatch.setattr(runtime, "hostRegister", refuse)
    receiver = gpu_world.receiver("gen-0", "auto", ("shm", "tcp"))
    publish(publisher, 0)
    assert isinstance(take(receiver).data, memoryview)


def test_an_agent_whose_cuda_is_broken_is_another_one_the_next_time(gpu_world: GpuWorld) -> None:
    gpu_world.start("cuda_ipc")
    publisher, receiver = gpu_world.bench.publisher(), gpu_world.receiver("gen-0", "cuda_ipc")
    push(publisher, 0, receiver)
    before = hub_worker(gpu_world.bench, "cuda_ipc")
    gpu_world.fault("break-copy-hub")
    push(publisher, 1, receiver)
    assert hub_worker(gpu_world.bench, "cuda_ipc") != before


def test_every_method_of_a_device_raises_ours(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda.Device(0)
    address = device.allocate(64)
    mark = device.mark_copies()
    memory = memoryview(bytearray(8))
    monkeypatch.setattr(machine, "broken", 700)
    calls = {
        "use": device.use,
        "free": lambda: device.free(address),
        "unpin": lambda: device.unpin(0),
        "to_device": lambda: device.to_device(address, 0, 8),
        "to_host": lambda: device.to_host(0, address, 8),
        "within": lambda: device.within(address, address, 8),
        "mark_copies": device.mark_copies,
        "mark_collectives": device.mark_collectives,
        "drain": device.drain,
        "export": lambda: device.export(address),
        "close": lambda: device.close(address),
        "done": lambda: mark.done,
    }
    for name, call in calls.items():
        with pytest.raises(cuda.GpuError, match=ILLEGAL):
            call()
            pytest.fail(name)
    for start in (
        lambda: device.allocate(8),
        lambda: device.open(bytes(64)),
        lambda: device.pin(memory),
        lambda: cuda.Device(1),
    ):
        with pytest.raises(StartupError, match=ILLEGAL):
            start()


def test_what_has_not_happened_yet_is_no_error(gpu_world: GpuWorld) -> None:
    device, blocked = cuda.Device(0), threading.Event()
    machine.enqueue(device.copies.ptr, blocked.wait)
    mark = device.mark_copies()
    assert not mark.done
    blocked.set()
    device.drain()
    assert mark.done


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


def test_an_abort_that_fails_is_no_abort(
    communicator: cuda.NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import nccl

    abort = nccl.NcclCommunicator.abort
    monkeypatch.setattr(cuda, "ABORT_DEADLINE_S", 0.2)

    def fail(self: nccl.NcclCommunicator) -> None:
        abort(self)
        raise KeyError(8)

    monkeypatch.setattr(nccl.NcclCommunicator, "abort", fail)
    assert not communicator.abort()


def test_an_abort_waits_for_the_call_that_is_in_nccl(
    communicator: cuda.NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort frees the communicator, which `check` and `bcast` of another thread would use."""
    from cupy.cuda import nccl

    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []
    abort = nccl.NcclCommunicator.abort

    def check(_self: nccl.NcclCommunicator) -> None:
        inside.set()
        assert leave.wait(WAIT_S)
        order.append("checked")

    def aborted(self: nccl.NcclCommunicator) -> None:
        order.append("aborted")
        abort(self)

    monkeypatch.setattr(nccl.NcclCommunicator, "check_async_error", check)
    monkeypatch.setattr(nccl.NcclCommunicator, "abort", aborted)
    monkeypatch.setattr(cuda, "ABORT_DEADLINE_S", WAIT_S)
    threads = [threading.Thread(target=communicator.check)]
    threads[0].start()
    assert inside.wait(WAIT_S)
    threads.append(threading.Thread(target=communicator.abort))
    threads[1].start()
    threads[1].join(0.05)  # as much as it needs where nothing holds it up
    assert order == []
    leave.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["checked", "aborted"]
    with pytest.raises(PeerLostError, match="was aborted"):
        communicator.check()


def test_an_abort_does_not_wait_for_a_call_that_hangs(
    communicator: cuda.NcclCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the process has to go."""
    monkeypatch.setattr(cuda, "ABORT_DEADLINE_S", 0.05)
    with communicator._entering:
        assert not communicator.abort()
    assert communicator.abort()


@pytest.mark.parametrize("mode", ["prohibited", "exclusive-process"])
def test_a_gpu_that_lets_in_one_process_is_named(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    modes = {name: number for number, name in cuda.CLOSED_MODES.items()}
    monkeypatch.setenv("FAKE_CUDA_COMPUTE_MODE", str(modes[mode]))
    with pytest.raises(StartupError, match=f"compute mode {mode}.*nvidia-smi -i 1 -c DEFAULT"):
        cuda.facts(1)


def test_device_memory_is_asked_for_before_it_is_taken(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import runtime

    device = cuda.Device(0)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "99")
    monkeypatch.setattr(runtime, "malloc", lambda _size: pytest.fail("taken"))
    with pytest.raises(StartupError, match="no room for 100 bytes of weights, 99 are free"):
        device.allocate(100)
