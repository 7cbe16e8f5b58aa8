"""Promises of every plane: hub, workers and receivers are real, and so is all but CuPy."""

import os
import signal
from typing import Any

import pytest
from fakes.gpu_world import CHUNK, TOTAL, GpuWorld, hub_worker, kill_worker
from fakes.hub_bench import OTHER_LAYOUT, Relay, content, load, publish, push, take, whole
from fakes.slowness import seconds

from umbra.proto.errors import UsageError
from umbra.services.weights.arena import SHM
from umbra.services.weights.gpu.cuda import DeviceMemory
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

PLANES = pytest.mark.parametrize("plane", ["shm", "tcp", "nccl", "cuda_ipc"])
GPU_PLANES = pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
NAMES = ("gen-0", "gen-1")
ELSE = ("shm", "tcp")


def receiver(world: GpuWorld, name: str, plane: str, **gpu: Any) -> Receiver:
    if plane in ("nccl", "cuda_ipc"):
        return world.receiver(name, plane, **gpu)
    return world.bench.receiver(name, planes=[plane])


def served(
    world: GpuWorld, plane: str, *names: str, deadline_s: float = 8.0, **gpu: Any
) -> tuple[Publisher, list[Receiver]]:
    """A publisher, and receivers that have its version 0."""
    world.start(plane, deadline_s=seconds(deadline_s))
    publisher = world.bench.publisher()
    receivers = [receiver(world, name, plane, **gpu) for name in names]
    push(publisher, 0, *receivers)
    return publisher, receivers


@pytest.mark.parametrize(
    ("plane", "delays"),
    [("shm", ""), ("tcp", ""), ("nccl", "0.005,0"), ("nccl", "0,0.005"), ("cuda_ipc", "0.005,0")],
)
def test_every_version_reaches_every_receiver_and_a_late_one_the_newest(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, plane: str, delays: str
) -> None:
    """Then one leaves. Whoever joins a communicator late disturbs nobody, and is in the next.

    Copies or collectives of the GPU are slow: one that is not waited for is a push that fails.
    """
    monkeypatch.setenv("FAKE_CUDA_DELAYS", delays)
    publisher, receivers = served(gpu_world, plane, *NAMES)
    for version in (1, 2, 3):
        push(publisher, version, *receivers)
    rows = gpu_world.rows(8)
    assert {(row["version"], row["receiver"]) for row in rows} == {
        (version, name) for version in range(4) for name in NAMES
    }
    assert {row["plane"] for row in rows} == {plane}
    assert all(row["bytes"] == TOTAL and row["snapshot_s"] == 0.25 for row in rows)
    assert all(row["commit_s"] == 0.125 for row in rows)
    protocol = gpu_world.bench.hub.protocol
    assert protocol.serving == dict.fromkeys(NAMES, 3)
    assert protocol.counters["failed"] == 0
    late = receiver(gpu_world, "late", plane)
    staged = take(late)
    assert (staged.version, whole(staged)) == (3, content(3))
    assert isinstance(staged.data, DeviceMemory) == (plane == "cuda_ipc")
    late.committed(staged, 0.0)
    if plane == "cuda_ipc":
        assert len(gpu_world.opened) == 3 and len(set(gpu_world.opened)) == 1, (
            "each receiver maps the one export once"
        )
    push(publisher, 4, *receivers, late)
    receivers[1].close()
    gpu_world.leave("gen-1")
    for version in (5, 6):
        push(publisher, version, receivers[0], late)
    if plane == "nccl":
        *first, last = gpu_world.communicators
        assert first[:2] == [("hub", *NAMES), ("hub", *NAMES, "late")]
        assert last == ("hub", "gen-0", "late")


@pytest.mark.parametrize(("plane", "deadline_s"), [("tcp", 0.5), ("cuda_ipc", 0.5), ("nccl", 30.0)])
def test_one_that_loads_slowly_holds_up_nobody_and_its_version_is_left_alone(
    gpu_world: GpuWorld, plane: str, deadline_s: float
) -> None:
    """It is dropped where its deadline is short; `test_versions.py` has loads from arenas."""
    publisher, (quick, slow) = served(gpu_world, plane, *NAMES, deadline_s=deadline_s)
    publish(publisher, 1)
    load(quick, 1)
    while (loading := take(slow)).version < 1:
        slow.committed(loading, 0.0)
    for version in (2, 3, 4):
        publish(publisher, version)
        load(quick, version)
        assert slow.poll() is None
        assert whole(loading) == content(1)
    slow.committed(loading, 0.0)
    load(slow, 4)
    if plane == "nccl":
        push(publisher, 5, quick, slow)
        assert gpu_world.communicators == [("hub", *NAMES)], "nothing was rebuilt"


def spoil(world: GpuWorld, plane: str) -> None:
    if plane == "nccl":
        world.fault("spoil-bcast-gen-0")
    else:
        for path in world.folder.glob("memory-*"):
            if path.stat().st_size > TOTAL:
                path.write_bytes(b"\0" * path.stat().st_size)  # the memory that the hub exports


@GPU_PLANES
def test_spoiled_bytes_are_never_loaded(gpu_world: GpuWorld, plane: str) -> None:
    """On plane shm they are not served: `test_versions.py`."""
    publisher, _ = served(gpu_world, plane, "first")
    spoil(gpu_world, plane)
    push(publisher, 1, receiver(gpu_world, "gen-0", plane))
    assert gpu_world.bench.hub.protocol.counters["failed"] >= 1


@PLANES
def test_another_layout_and_another_hub(gpu_world: GpuWorld, plane: str) -> None:
    bench = gpu_world.bench
    gpu_world.start(plane)
    publisher = bench.publisher()
    one = receiver(gpu_world, "gen-0", plane)
    publish(publisher, 0)
    loading = take(one)
    publisher.close()
    publisher = bench.publisher(OTHER_LAYOUT, "trainer-2")
    assert whole(loading) == content(0)
    one.committed(loading, 0.0)
    for version in (1, 2):
        push(publisher, version, one)
    gpu_world.start(plane)  # without a word to anyone
    for version in (3, 4):
        push(publisher, version, one)
    assert len(list(SHM.glob(f"umbra-{bench._run_id}-*"))) == 1


# -- workers that die or hang ---------------------------------------------------------------------


@GPU_PLANES
def test_the_hubs_worker_is_killed(gpu_world: GpuWorld, plane: str) -> None:
    """Over nccl in the middle of a broadcast. It costs one attempt, and nobody is dropped."""
    publisher, (one,) = served(gpu_world, plane, "gen-0", deadline_s=60.0)
    if plane == "nccl":
        gpu_world.fault("hang-bcast-hub")
        publish(publisher, 1)
        gpu_world.await_file("hang-bcast-reached-hub")
    os.kill(hub_worker(gpu_world.bench, plane), signal.SIGKILL)
    if plane == "cuda_ipc":
        publish(publisher, 1)
    load(one, 1)
    push(publisher, 2, one)
    counters = gpu_world.bench.hub.protocol.counters
    assert (counters["deadline"], counters["dropped"]) == (0, 0)
    if plane == "nccl":
        assert gpu_world.communicators == [("hub", "gen-0"), ("hub", "gen-0")]
    else:
        assert len(set(gpu_world.opened)) == 2, "another export, mapped instead of the one before"


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
def test_a_worker_that_is_killed_in_a_broadcast(
    gpu_world: GpuWorld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    notices: bool,
) -> None:
    """1. Version 1 is under way; gen-1's worker is killed, and it fetches. 2. More versions.

    Result: engines load each version from device memory, whole, that of the worker that runs; the
    others abort their communicator (the double would end a process that drops one without) and the
    next one has a fresh id.
    """
    if notices:
        monkeypatch.setenv("FAKE_NCCL_NOTICES", "1")  # NCCL reports an asynchronous error
    publisher, (first, second) = served(gpu_world, "nccl", *NAMES, loads=True)
    starts = gpu_world.gpus["gen-0"].worker.starts
    handles: set[bytes] = set()
    for version in (1, 2, 3):
        if version == 1:
            gpu_world.fault("hang-bcast-gen-1")
        publish(publisher, version)
        if version == 1:
            gpu_world.await_file("hang-bcast-reached-gen-1")
            kill_worker(gpu_world.gpus["gen-1"])
        load(first, version)
        while (staged := take(second)).version < version:
            second.committed(staged, 0.0)
        assert isinstance(staged.data, DeviceMemory)
        assert whole(staged) == content(version)
        handles.add(staged.data.handle)
        second.committed(staged, 0.0)
    assert gpu_world.communicators == [("hub", *NAMES), ("hub", *NAMES)]
    assert gpu_world.gpus["gen-0"].worker.starts == starts, "an abort is enough for the living"
    assert gpu_world.bench.hub.protocol.counters["dropped"] == 0
    assert "the GPU worker has ended" in caplog.text
    assert {handle.rstrip(b"\0").decode() for handle in handles} < set(gpu_world.opened)
    assert len(gpu_world.opened) == 3, "that of gen-0, and of each worker of gen-1"


# -- which plane it is, and what a GPU has no room for --------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("FAKE_CUDA_MEMORY", TOTAL - 1, "without plane cuda_ipc from now on: GPU 0 has no room"),
        ("FAKE_CUDA_MEMORY", TOTAL, "GPU 0 has no room"),  # for one version, not the hub's two
        ("FAKE_CUDA_IPC", 0, "without plane cuda_ipc from now on: the hub's device memory cannot"),
    ],
    ids=["the receiver has no room", "the hub has no room", "memory cannot be mapped"],
)
def test_a_gpu_that_cannot_be_used_is_no_reason_to_stop(
    gpu_world: GpuWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, value: int, told: str,
) -> None:  # fmt: skip
    """Versions go over shared memory, and the reason is named."""
    monkeypatch.setenv(name, str(value))
    gpu_world.start("auto")
    publisher = gpu_world.bench.publisher()
    one = gpu_world.receiver("gen-0", "auto", ELSE)
    for version in range(2):
        push(publisher, version, one)
    assert gpu_world.row_of(1, one)["plane"] == "shm"
    assert told in caplog.text


def test_auto_takes_no_large_share_of_a_gpu(
    gpu_world: GpuWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engine come to need memory that is free now; set by name, it is taken."""
    monkeypatch.setenv("FAKE_CUDA_TOTAL", str(40 * TOTAL))  # 3 versions are 7.5 %
    gpu_world.start("auto")
    publisher = gpu_world.bench.publisher()
    careful = gpu_world.receiver("gen-0", "auto", ELSE)
    told = gpu_world.receiver("gen-1", "cuda_ipc")
    push(publisher, 0, careful, told)
    planes = {row["receiver"]: row["plane"] for row in gpu_world.rows(2)}
    assert planes == {"gen-0": "shm", "gen-1": "cuda_ipc"}
    assert 'plane auto takes at most 5%: set weight_hub.plane = "cuda_ipc"' in caplog.text


def test_without_room_on_the_gpu_the_engine_loads_from_the_host(
    gpu_world: GpuWorld, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_world.start("nccl")
    publisher = gpu_world.bench.publisher()
    one = gpu_world.receiver("gen-0", "nccl", loads=True, FAKE_CUDA_MEMORY=str(3 * CHUNK))
    for version in range(2):
        publish(publisher, version)
        staged = take(one)
        assert isinstance(staged.data, memoryview)
        assert whole(staged) == content(version)
        one.committed(staged, 0.0)
    assert gpu_world.communicators == [("hub", "gen-0")]
    assert "the engine loads from host memory from now on: " in caplog.text


def test_a_gpu_that_is_not_there_is_the_users_mistake(gpu_world: GpuWorld) -> None:
    with pytest.raises(UsageError, match=r'"nccl" cannot be used here: .*there is no GPU 7: 2 can'):
        gpu_world.gpu("gen-0", "nccl", device=7)


def test_a_relay_receives_a_broadcast_and_serves_its_node(gpu_world: GpuWorld) -> None:
    """The hub is on one node, a relay and a generator on another."""
    bench = gpu_world.bench
    gpu_world.start("auto")
    publisher = bench.publisher()
    gpu = gpu_world.gpu("relay-1", device=1, planes=("nccl",))
    relay = Relay(bench, "relay-1", gpu=gpu, deadline_s=seconds(8.0))
    local = bench.receiver("gen-0", ELSE, "relay-1")
    for version in range(3):
        push(publisher, version, local)
    relay.stop()
    assert gpu_world.communicators == [("hub", "relay-1")]
    assert {row["plane"] for row in gpu_world.rows(3)} == {"nccl"}
