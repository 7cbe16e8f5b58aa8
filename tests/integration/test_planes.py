"""Promises of every plane: hub, publisher and receivers are real, and so is all but CuPy."""

import pytest
from fakes.gpu_world import TOTAL, GpuWorld
from fakes.hub_bench import OTHER_LAYOUT, content, load, publish, push, take, whole
from fakes.slowness import seconds

from umbra.services.weights.arena import SHM
from umbra.services.weights.gpu.cuda import DeviceMemory
from umbra.services.weights.receiver import Receiver

PLANES = pytest.mark.parametrize("plane", ["shm", "tcp", "nccl", "cuda_ipc"])
NAMES = ("gen-0", "gen-1")


def receiver(world: GpuWorld, name: str, plane: str) -> Receiver:
    if plane in ("nccl", "cuda_ipc"):
        return world.receiver(name, plane)
    return world.bench.receiver(name, planes=[plane])


@PLANES
def test_every_version_reaches_every_receiver_and_a_late_one_the_newest(
    gpu_world: GpuWorld, plane: str
) -> None:
    gpu_world.start(plane)
    publisher = gpu_world.bench.publisher()
    receivers = [receiver(gpu_world, name, plane) for name in NAMES]
    for version in range(4):
        push(publisher, version, *receivers)
    rows = gpu_world.rows(8)
    assert {(row["version"], row["receiver"]) for row in rows} == {
        (version, name) for version in range(4) for name in NAMES
    }
    assert {row["plane"] for row in rows} == {plane}
    assert all(row["bytes"] == TOTAL and row["snapshot_s"] == 0.25 for row in rows)
    assert all(row["commit_s"] == 0.125 for row in rows)
    assert gpu_world.bench.hub.protocol.serving == dict.fromkeys(NAMES, 3)
    staged = take(receiver(gpu_world, "late", plane))
    assert (staged.version, whole(staged)) == (3, content(3))
    assert isinstance(staged.data, DeviceMemory) == (plane == "cuda_ipc")
    if plane == "cuda_ipc":
        opened = (gpu_world.folder / "ipc-opened").read_text().splitlines()
        assert len(opened) == 3 and len(set(opened)) == 1, "each receiver maps the one export once"


@pytest.mark.parametrize("plane", ["tcp", "cuda_ipc"])
def test_what_is_being_loaded_is_left_alone(gpu_world: GpuWorld, plane: str) -> None:
    """The hub drops who takes long, and pushes the next; `test_verify.py` has loads from arenas."""
    gpu_world.start(plane, deadline_s=seconds(0.5))
    publisher = gpu_world.bench.publisher()
    one = receiver(gpu_world, "gen-0", plane)
    publish(publisher, 0)
    loading = take(one)
    for version in range(1, 5):
        publish(publisher, version)
        assert one.poll() is None
        assert whole(loading) == content(0)
    one.committed(loading, 0.0)
    load(one, 4)


def spoil(world: GpuWorld, plane: str) -> None:
    if plane == "nccl":
        world.fault("spoil-bcast-gen-0")
    else:
        for path in world.folder.glob("memory-*"):
            if path.stat().st_size > TOTAL:
                path.write_bytes(b"\0" * path.stat().st_size)  # the memory that the hub exports


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
def test_spoiled_bytes_are_never_loaded(gpu_world: GpuWorld, plane: str) -> None:
    """On plane shm they are not served: `test_verify.py`."""
    gpu_world.start(plane)
    publisher = gpu_world.bench.publisher()
    publish(publisher, 0)
    load(receiver(gpu_world, "first", plane), 0)
    spoil(gpu_world, plane)
    late = receiver(gpu_world, "gen-0", plane)
    counters = gpu_world.bench.hub.protocol.counters
    push(publisher, 1, late)
    assert counters["failed"] >= 1


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


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
def test_one_that_leaves_costs_the_others_nothing(gpu_world: GpuWorld, plane: str) -> None:
    """`test_weight_push_faults.py` has those that are killed, over the other planes."""
    gpu_world.start(plane)
    publisher = gpu_world.bench.publisher()
    receivers = {name: receiver(gpu_world, name, plane) for name in NAMES}
    push(publisher, 0, *receivers.values())
    receivers["gen-1"].close()
    gpu_world.leave("gen-1")
    for version in (1, 2):
        publish(publisher, version)
        load(receivers["gen-0"], version)
    if plane == "nccl":
        assert gpu_world.communicators[-1] == ("hub", "gen-0")
