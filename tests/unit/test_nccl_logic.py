"""Planes `nccl` and `cuda_ipc` without a GPU: membership, transfers, agents, why they are out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from umbra.deploy.env_command import command as env
from umbra.proto.errors import DeadlineError, PeerLostError, UmbraError, UsageError
from umbra.services.weight_hub import nccl_plane
from umbra.services.weight_hub.agent_process import AgentProcess
from umbra.services.weight_hub.nccl_agent import Agent
from umbra.services.weight_hub.nccl_group import Build, Facts, Group, Restart, mismatch
from umbra.services.weight_hub.nccl_transfer import broadcast
from umbra.services.weight_hub.planes import PLANES, check_plane

FACTS = Facts(nccl=22809, cuda_major=13, environment="a", variables={"NCCL_NET": "Socket"})
FAKE = (str(Path(__file__).parents[1] / "programs" / "fake_agent.py"),)
WAIT_S = 20.0


def group() -> Group:
    ids = iter(range(100))
    return Group(FACTS, lambda: bytes([next(ids)]), deadline_s=10.0)


def test_every_change_of_membership_makes_a_communicator_with_a_fresh_id() -> None:
    hub = group()
    assert hub.reconcile(0) is None
    assert hub.join("a", FACTS) is None
    assert hub.reconcile(0) == Build(1, b"\0", {"a": 1})
    assert hub.reconcile(0) is None, "it is being built"
    hub.built("a", 1)
    assert hub.state == "building", "the hub's own agent is not there yet"
    hub.built(None, 1)
    assert hub.state == "ready"
    hub.join("b", FACTS)
    build = hub.reconcile(1)
    assert build is not None
    assert build == Build(2, b"\1", {"a": 1, "b": 2})
    assert build.size == 3
    hub.built("a", 1)  # late, of the one before
    hub.built("b", 2)
    hub.built(None, 2)
    assert hub.state == "building"
    hub.leave("a")
    assert hub.reconcile(2) == Build(3, b"\2", {"b": 1})
    hub.leave("b")
    assert hub.state == "empty"
    assert hub.reconcile(3) is None


def test_who_hangs_in_nccl_is_restarted_and_the_others_go_on() -> None:
    hub = group()
    hub.join("a", FACTS)
    hub.join("b", FACTS)
    hub.reconcile(0)
    hub.built("a", 1)
    assert hub.tick(9.9) == []
    reason = "joining NCCL epoch 1 took more than 10 s"
    assert hub.tick(10) == [Restart("b", reason), Restart("", reason)]
    assert hub.reconcile(10) == Build(2, b"\1", {"a": 1})
    hub.built("a", 2)
    hub.built(None, 2)
    assert hub.failed("a", 1, "old news") == []
    assert hub.failed("a", 2, "its GPU fell off") == [Restart("a", "its GPU fell off")]
    assert hub.state == "empty"


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (Facts(nccl=23007, cuda_major=13, environment="a"), "NCCL 23007 there, 22809 here"),
        (Facts(nccl=22809, cuda_major=12, environment="a"), "CUDA 12 there, 13 here"),
        (
            Facts(nccl=22809, cuda_major=13, environment="b", variables={"NCCL_PROTO": "LL"}),
            "NCCL_NET, NCCL_PROTO",
        ),
    ],
)
def test_who_would_hang_the_others_is_refused(theirs: Facts, reason: str) -> None:
    assert mismatch(FACTS, FACTS) is None
    hub = group()
    answer = hub.join("a", theirs)
    assert answer is not None and reason in answer
    assert hub.state == "empty"


class FakeGpu:
    """Device and communicator in one: work is done when the test says, and noted."""

    class Mark:
        def __init__(self, gpu: FakeGpu) -> None:
            self._gpu, self._number = gpu, len(gpu.log)

        @property
        def done(self) -> bool:
            return self._gpu.done_until >= self._number

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.done_until = 0
        self.aborted = False
        self.error = ""
        self.now = 0.0

    def to_device(self, target: int, source: int, size: int) -> None:
        self.log.append(("to_device", target, source))

    def to_host(self, target: int, source: int, size: int) -> None:
        self.log.append(("to_host", target, source))

    def broadcast(self, address: int, size: int) -> None:
        self.log.append(("broadcast", address, size))

    def mark_copies(self) -> FakeGpu.Mark:
        return FakeGpu.Mark(self)

    mark_collectives = mark_copies

    def check(self) -> None:
        if self.error:
            raise PeerLostError(self.error)

    def abort(self) -> bool:
        self.aborted = True
        return True

    def advance(self, seconds: float) -> None:
        self.now += seconds


BUCKETS = [(0, 100), (100, 200), (200, 250)]


def transfer(gpu: FakeGpu, *, sends: bool, working: bool = True) -> None:
    def pause(seconds: float) -> None:
        gpu.advance(0.1)
        if working:
            gpu.done_until = len(gpu.log)

    broadcast(
        BUCKETS, gpu, gpu, host=1000, ring=[1, 2], sends=sends, deadline_s=1.0,
        clock=lambda: gpu.now, pause=pause,
    )  # fmt: skip


def test_buckets_go_through_the_ring_in_order() -> None:
    gpu = FakeGpu()
    transfer(gpu, sends=True)
    assert gpu.log == [
        ("to_device", 1, 1000), ("broadcast", 1, 100),
        ("to_device", 2, 1100), ("broadcast", 2, 100),
        ("to_device", 1, 1200), ("broadcast", 1, 50),
    ]  # fmt: skip
    gpu = FakeGpu()
    transfer(gpu, sends=False)
    assert gpu.log[:2] == [("broadcast", 1, 100), ("to_host", 1000, 1)]
    assert gpu.log[-2:] == [("broadcast", 1, 50), ("to_host", 1200, 1)]
    assert not gpu.aborted


def test_a_peer_that_is_gone_costs_a_deadline_and_an_abort() -> None:
    gpu = FakeGpu()
    with pytest.raises(DeadlineError, match="bucket 0 of 3 was not broadcast within 1 s"):
        transfer(gpu, sends=True, working=False)
    assert gpu.aborted


def test_an_error_of_nccl_ends_the_transfer_before_its_deadline() -> None:
    gpu = FakeGpu()
    gpu.error = "remote process exited"
    with pytest.raises(PeerLostError, match="remote process exited"):
        transfer(gpu, sends=False, working=False)
    assert gpu.aborted
    assert gpu.now == 0


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    agent = AgentProcess(0, program=FAKE)
    yield agent
    agent.kill()


def test_an_agent_that_hangs_is_killed_and_another_serves(agent: AgentProcess) -> None:
    assert agent.call("facts", WAIT_S) == {"did": "facts"}
    with pytest.raises(DeadlineError, match="no answer from the NCCL agent"):
        agent.call("join", 0.1, uid="hang")
    assert agent.pid is None
    assert agent.call("join", WAIT_S, uid="good") == {"did": "join"}
    assert agent.starts == 2
    with pytest.raises(UmbraError, match="NCCL agent: refused"):
        agent.call("join", WAIT_S, uid="refuse")
    with pytest.raises(PeerLostError, match="has ended"):
        agent.call("join", WAIT_S, uid="die")


no_cuda = pytest.mark.skipif(nccl_plane.cuda_unavailable() is None, reason="there is a GPU here")


@no_cuda
def test_without_cuda_the_planes_say_why() -> None:
    assert "cupy" not in sys.modules or nccl_plane.cuda_unavailable() != nccl_plane.INSTALL
    for name in ("nccl", "cuda_ipc"):
        reason = PLANES[name].available()
        assert reason and ("cupy" in reason or "CUDA" in reason)
        with pytest.raises(UsageError, match=f'weight_hub.plane = "{name}" cannot be used: '):
            check_plane(name)
    assert "plane nccl cannot be used" in Agent(0).carry_out({"op": "facts"})["error"]
    assert "no such order" in Agent(0).carry_out({"op": "dance"})["error"]


@no_cuda
def test_umbra_env_names_planes_and_reasons() -> None:
    found = json.loads(CliRunner().invoke(env, ["--json"], standalone_mode=False).output)
    assert found["planes"]["shm"] is None
    assert found["planes"]["tcp"] is None
    assert found["planes"]["nccl"] == PLANES["nccl"].available()
    assert found["packages"]["pyzmq"]
    assert found["packages"]["cupy-cuda12x"] is None
    text = CliRunner().invoke(env, [], standalone_mode=False).output
    assert "plane shm         available" in text
    assert "plane nccl        not available: " in text
