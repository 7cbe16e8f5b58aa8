"""Plane `cuda_ipc`, whole, and which plane is chosen; all is real but CuPy, which is a double."""

import os
import signal

import pytest
from fakes.gpu_world import TOTAL, GpuWorld, hub_worker
from fakes.hub_bench import load, push

from umbra.proto.errors import UsageError


def test_a_killed_agent_of_the_hub_costs_cuda_ipc_one_attempt(gpu_world: GpuWorld) -> None:
    gpu_world.start("cuda_ipc")
    publisher = gpu_world.bench.publisher()
    receiver = gpu_world.receiver("gen-0", "cuda_ipc")
    push(publisher, 0, receiver)
    os.kill(hub_worker(gpu_world.bench, "cuda_ipc"), signal.SIGKILL)
    for version in (1, 2):
        push(publisher, version, receiver)
    assert gpu_world.bench.hub.protocol.counters["dropped"] == 0
    opened = (gpu_world.folder / "ipc-opened").read_text().splitlines()
    assert len(set(opened)) == 2, "another export, mapped instead of the one before"


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
    receiver = gpu_world.receiver("gen-0", "auto", ("shm", "tcp"))
    for version in range(2):
        push(publisher, version, receiver)
    assert gpu_world.row_of(1, receiver)["plane"] == "shm"
    assert told in caplog.text


def test_auto_takes_no_large_share_of_a_gpu(
    gpu_world: GpuWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engine come to need memory that is free now; set by name, it is taken."""
    monkeypatch.setenv("FAKE_CUDA_TOTAL", str(40 * TOTAL))  # 3 versions are 7.5 %
    gpu_world.start("auto")
    publisher = gpu_world.bench.publisher()
    careful = gpu_world.receiver("gen-0", "auto", ("shm", "tcp"))
    told = gpu_world.receiver("gen-1", "cuda_ipc")
    push(publisher, 0, careful)
    load(told, 0)
    planes = {row["receiver"]: row["plane"] for row in gpu_world.rows(2)}
    assert planes == {"gen-0": "shm", "gen-1": "cuda_ipc"}
    assert 'plane auto takes at most 5%: set weight_hub.plane = "cuda_ipc"' in caplog.text


def test_planes_are_chosen_by_gpu_and_host(gpu_world: GpuWorld) -> None:
    gpu_world.start("auto")
    publisher = gpu_world.bench.publisher()
    receivers = {
        "same": gpu_world.receiver("same", "auto", ("shm", "tcp")),
        "other-gpu": gpu_world.receiver("other-gpu", "auto", ("shm", "tcp"), device=1),
        "other-host": gpu_world.receiver(
            "other-host", "auto", ("shm", "tcp"), device=1, host="elsewhere"
        ),
        "other-nccl": gpu_world.receiver(
            "other-nccl", "auto", ("shm", "tcp"), device=1, host="far", FAKE_NCCL_VERSION="23007"
        ),
    }
    push(publisher, 0, *receivers.values())
    assert {row["receiver"]: row["plane"] for row in gpu_world.rows(4)} == {
        "same": "cuda_ipc",
        "other-gpu": "shm",
        "other-host": "nccl",
        "other-nccl": "tcp",
    }


def test_a_gpu_that_is_not_there_is_the_users_mistake(gpu_world: GpuWorld) -> None:
    with pytest.raises(UsageError, match=r'"nccl" cannot be used here: .*there is no GPU 7: 2 can'):
        gpu_world.gpu("gen-0", "nccl", device=7)
