"""Plane `nccl`, whole: hub, worker processes, receivers; only CuPy is a double."""

import os
import signal

import pytest
from fakes.gpu_world import CHUNK, GpuWorld, hub_worker, kill_worker
from fakes.hub_bench import content, load, publish, push, take, whole
from fakes.relays import Relay
from fakes.slowness import seconds

from umbra.services.weights.gpu.cuda import DeviceMemory
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

NAMES = ("gen-0", "gen-1")


def served(world: GpuWorld, *names: str, loads: bool = False) -> tuple[Publisher, list[Receiver]]:
    """A publisher, and receivers that have its version 0 by broadcast."""
    publisher = world.bench.publisher()
    receivers = [world.receiver(name, "nccl", loads=loads) for name in names]
    push(publisher, 0, *receivers)
    return publisher, receivers


def test_a_late_joiner_fetches_and_is_in_the_next_communicator(gpu_world: GpuWorld) -> None:
    gpu_world.start("nccl")
    publisher, (first,) = served(gpu_world, "gen-0")
    late = gpu_world.receiver("gen-1", "nccl")
    load(late, 0)
    assert gpu_world.communicators == [("hub", "gen-0")], "it must not disturb the other"
    push(publisher, 1, first, late)
    assert gpu_world.communicators == [("hub", "gen-0"), ("hub", *NAMES)]
    assert len(gpu_world.communicators) == 2


@pytest.mark.timeout(120)  # it waits for several deadlines
def test_one_that_hangs_in_init_is_killed_and_the_others_go_on(gpu_world: GpuWorld) -> None:
    """1. gen-1's worker hangs whenever it enters a communicator. 2. Five versions are published.

    Result: both get each of them; gen-0 by broadcast as soon as it is known who hangs, gen-1 never;
    when its process is another, and hangs no more, it is in again.
    """
    gpu_world.start("nccl", deadline_s=seconds(6.0))
    publisher = gpu_world.bench.publisher()
    gpu_world.fault("stay-hang-init-gen-1")
    receivers = {name: gpu_world.receiver(name, "nccl") for name in NAMES}
    pids = {name: gpu_world.gpus[name].worker.pid for name in NAMES}
    for version in range(5):
        push(publisher, version, *receivers.values())
    assert set(gpu_world.communicators) == {("hub", "gen-0")}
    assert gpu_world.gpus["gen-1"].worker.pid != pids["gen-1"], "it was killed"
    assert gpu_world.bench.hub.protocol.counters["dropped"] == 0
    # In the round for version 0 both hung, in one of the next gen-1 was the only new one.
    assert gpu_world.bench.hub.protocol.counters["failed"] == 4
    receivers.pop("gen-1").close()
    (gpu_world.folder / "stay-hang-init-gen-1").unlink()
    receivers["gen-1"] = gpu_world.receiver("gen-1", "nccl")
    load(receivers["gen-1"], 4)
    push(publisher, 5, *receivers.values())
    assert gpu_world.communicators[-1] == ("hub", *NAMES)


@pytest.mark.parametrize("notices", [False, True])
def test_an_agent_that_is_killed_in_a_broadcast(
    gpu_world: GpuWorld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    notices: bool,
) -> None:
    """1. Version 1 is under way; gen-1's worker is killed. 2. More versions.

    Result: both have version 1, whole; the others abort their communicator (the double would end a
    process that drops one without) and the next one has a fresh id.
    """
    if notices:
        monkeypatch.setenv("FAKE_NCCL_NOTICES", "1")  # NCCL reports an asynchronous error
    gpu_world.start("nccl")
    publisher, receivers = served(gpu_world, *NAMES)
    starts = gpu_world.gpus["gen-0"].worker.starts
    gpu_world.fault("hang-bcast-gen-1")
    publish(publisher, 1)
    gpu_world.await_file("hang-bcast-reached-gen-1")
    kill_worker(gpu_world.gpus["gen-1"])
    for receiver in receivers:
        load(receiver, 1)
    for version in (2, 3):
        push(publisher, version, *receivers)
    assert gpu_world.communicators == [("hub", *NAMES), ("hub", *NAMES)]
    assert len(gpu_world.communicators) == 2
    assert gpu_world.gpus["gen-0"].worker.starts == starts, "an abort is enough for the living"
    assert gpu_world.bench.hub.protocol.counters["dropped"] == 0
    assert "the GPU worker has ended" in caplog.text


def test_an_engine_loads_from_the_memory_of_its_gpu(gpu_world: GpuWorld) -> None:
    """1. Two broadcasts. 2. gen-1's worker is killed in one: it fetches. 3. Another broadcast.

    Result: each version is taken from device memory, whole, that of the worker that runs; nothing
    else is mapped.
    """
    gpu_world.start("nccl")
    publisher, (first, second) = served(gpu_world, *NAMES, loads=True)
    handles: set[bytes] = set()
    for version in (1, 2, 3):
        if version == 2:
            gpu_world.fault("hang-bcast-gen-1")
        publish(publisher, version)
        if version == 2:
            gpu_world.await_file("hang-bcast-reached-gen-1")
            kill_worker(gpu_world.gpus["gen-1"])
        load(first, version)
        while (staged := take(second)).version < version:
            second.committed(staged, 0.0)
        assert isinstance(staged.data, DeviceMemory)
        assert whole(staged) == content(version)
        handles.add(staged.data.handle)
        second.committed(staged, 0.0)
    assert len(handles) == 2, "one of each worker"
    opened = (gpu_world.folder / "ipc-opened").read_text().split()
    assert {handle.rstrip(b"\0").decode() for handle in handles} < set(opened[1::2])
    assert len(opened) // 2 == 3


def test_without_room_on_the_gpu_the_engine_loads_from_the_host(
    gpu_world: GpuWorld, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_world.start("nccl")
    publisher = gpu_world.bench.publisher()
    receiver = gpu_world.receiver("gen-0", "nccl", loads=True, FAKE_CUDA_MEMORY=str(3 * CHUNK))
    for version in range(2):
        publish(publisher, version)
        staged = take(receiver)
        assert isinstance(staged.data, memoryview)
        assert whole(staged) == content(version)
        receiver.committed(staged, 0.0)
    assert gpu_world.communicators == [("hub", "gen-0")]
    assert "the engine loads from host memory from now on: " in caplog.text


def test_the_hubs_own_agent_is_killed_in_a_broadcast(gpu_world: GpuWorld) -> None:
    gpu_world.start("nccl", deadline_s=seconds(60.0))
    publisher, (receiver,) = served(gpu_world, "gen-0")
    gpu_world.fault("hang-bcast-hub")
    publish(publisher, 1)
    gpu_world.await_file("hang-bcast-reached-hub")
    os.kill(hub_worker(gpu_world.bench, "nccl"), signal.SIGKILL)
    load(receiver, 1)
    push(publisher, 2, receiver)
    assert gpu_world.communicators == [("hub", "gen-0"), ("hub", "gen-0")]
    assert gpu_world.bench.hub.protocol.counters["deadline"] == 0


def test_one_that_loads_slowly_holds_up_nobody(gpu_world: GpuWorld) -> None:
    """gen-1 is loading version 1 while 2 and 3 come: it fetches the newest later."""
    gpu_world.start("nccl", deadline_s=seconds(30.0))
    publisher, (quick, slow) = served(gpu_world, *NAMES)
    publish(publisher, 1)
    load(quick, 1)
    loading = take(slow)
    for version in (2, 3):
        publish(publisher, version)
        load(quick, version)
        assert whole(loading) == content(1)
    slow.committed(loading, 0.0)
    load(slow, 3)
    push(publisher, 4, quick, slow)
    assert gpu_world.communicators == [("hub", *NAMES)], "nothing was rebuilt"


def test_a_relay_receives_a_broadcast_and_serves_its_node(gpu_world: GpuWorld) -> None:
    """The hub is on one node, a relay and a generator on another; a generator elsewhere fetches."""
    bench = gpu_world.bench
    gpu_world.start("auto")
    publisher = bench.publisher()
    gpu = gpu_world.gpu("relay-1", device=1, planes=("nccl",))
    relay = Relay(bench, "relay-1", gpu=gpu, deadline_s=seconds(8.0))
    local = bench.receiver("gen-0", ["shm", "tcp"], "relay-1")
    for version in range(3):
        push(publisher, version, local)
    relay.stop()
    assert gpu_world.communicators == [("hub", "relay-1")]
    assert {row["plane"] for row in gpu_world.rows(3)} == {"nccl"}
