"""Planes `nccl` and `cuda_ipc` without a GPU: membership, transfers, workers, why they are out."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.slowness import limit

from umbra.deploy.check.machine import findings
from umbra.proto.errors import DeadlineError, PeerLostError, RejectedError, UmbraError, UsageError
from umbra.proto.messages import Prepare
from umbra.proto.records import GpuFacts
from umbra.services.config import WeightHubConfig
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import GpuWorker, GpuWorkerProcess
from umbra.services.weights.planes import receiving
from umbra.services.weights.planes.nccl import CommunicatorRanks, NcclGroup, Rounds
from umbra.services.weights.planes.plane import (
    Side,
    check_plane,
    choose_plane,
    mismatch,
    obstacle,
    unavailable,
)
from umbra.services.weights.planes.receiving import open_planes

FACTS = GpuFacts(nccl=22809, cuda_major=13, variables={"NCCL_NET": "Socket"})
FAKE = (str(Path(__file__).parents[1] / "programs" / "fake_gpu_worker.py"),)
WAIT_S = limit(20.0)


def test_every_change_of_membership_makes_a_communicator_of_the_next_epoch() -> None:
    group = NcclGroup(epoch=10)
    assert group.eligible == []
    group.join("a", "1")
    assert group.begin() == CommunicatorRanks(11, {"a": 1}, fresh=True)
    group.worked()
    assert group.begin() == CommunicatorRanks(11, {"a": 1}, fresh=False)
    group.join("b", "1")
    made = group.begin()
    assert made == CommunicatorRanks(12, {"a": 1, "b": 2}, fresh=True)
    assert made.size == 3
    group.worked()
    group.leave("a")
    assert group.begin() == CommunicatorRanks(13, {"b": 1}, fresh=True)
    group.worked()
    group.join("b", "2")
    assert group.begin() == CommunicatorRanks(14, {"b": 1}, fresh=True), "it is another process"
    group.worked()
    group.broke()
    assert group.begin() == CommunicatorRanks(15, {"b": 1}, fresh=True)
    group.leave("b")
    assert group.eligible == []


def rounds_until_settled(group: NcclGroup, hangs: set[str]) -> int:
    """How many communicators fail until one works in which everyone is who does not hang."""
    failures = 0
    while True:
        made = group.begin()
        if hangs & made.ranks.keys():
            failures += 1
            group.broke()
        else:
            group.worked()
            if not group.begin().fresh:
                return failures


def test_who_hangs_is_found_by_trial_and_the_others_go_on() -> None:
    group = NcclGroup()
    for name in "abcd":
        group.join(name, "1")
    assert rounds_until_settled(group, {"c"}) == 2, "once together, once alone"
    assert group.eligible == ["a", "b", "d"]
    group.join("c", "1")
    assert "c" not in group.eligible, "it is the same process, and would hang again"
    group.join("c", "2")
    assert rounds_until_settled(group, set()) == 0
    assert group.eligible == ["a", "b", "d", "c"]


def test_one_that_worked_and_hangs_now_is_found_as_well() -> None:
    group = NcclGroup()
    for name in "abc":
        group.join(name, "1")
    assert rounds_until_settled(group, set()) == 0
    group.join("d", "1")
    assert rounds_until_settled(group, {"d"}) == 1, "the only one who is not proven"
    group.leave("d")
    group.leave("c")
    assert rounds_until_settled(group, {"a"}) == 2
    assert group.eligible == ["b"]


def prepare(version: int, epoch: int = 1, slot: int = 0) -> Prepare:
    return Prepare(epoch=epoch, version=version, slot=slot, checksums=[version])


def gathered(*names: str) -> Rounds:
    rounds = Rounds(NcclGroup(), gather_s=1.0, start_s=5.0, ready_at=0.0)
    for name in names:
        rounds.group.join(name, "1")
    return rounds


def test_a_round_begins_when_all_wait_for_the_same_version() -> None:
    rounds = gathered("a", "b")
    rounds.offer("a", prepare(1), 0.0)
    assert rounds.settle(0.0, idle=True) == ([], None)
    rounds.offer("b", prepare(1), 0.5)
    assert rounds.settle(0.5, idle=False) == ([], None), "the worker is busy"
    _, begun = rounds.settle(0.5, idle=True)
    assert begun is not None
    assert begun.prepares.keys() == {"a", "b"}
    assert rounds.reported("a", 1, well=True) is None
    rounds.sent()
    assert rounds.current is not None
    assert rounds.reported("b", 9, well=True) is None, "of another push"
    assert rounds.reported("b", 1, well=True) is None
    assert rounds.current is None
    assert not rounds.group.begin().fresh


def test_who_waits_too_long_fetches() -> None:
    rounds = gathered("a", "b")
    rounds.offer("a", prepare(1), 0.0)
    assert rounds.settle(0.9, idle=True) == ([], None)
    assert rounds.waiting
    assert rounds.settle(1.0, idle=True) == ([("a", prepare(1))], None)
    rounds.offer("b", prepare(1), 2.0)
    assert rounds.settle(2.0, idle=True) == ([("b", prepare(1))], None), "a has it already"
    rounds.offer("c", prepare(1), 2.0)
    assert rounds.settle(2.0, idle=True) == ([("c", prepare(1))], None), "it is in no group"


def test_the_start_of_the_hubs_agent_is_waited_for() -> None:
    rounds = gathered("a")
    rounds.ready_at = None
    rounds.offer("a", prepare(1), 0.0)
    assert rounds.settle(4.0, idle=True) == ([], None)
    rounds.ready_at = 4.5
    assert rounds.settle(4.6, idle=True)[1] is not None
    rounds.failed()
    rounds.ready_at = None
    rounds.offer("a", prepare(2), 5.0)
    assert rounds.settle(10.0, idle=True) == ([("a", prepare(2))], None)


def test_a_round_that_fails_gives_up_those_who_have_not_answered() -> None:
    rounds = gathered("a", "b", "c")
    for name in "abc":
        rounds.offer(name, prepare(1), 0.0)
    rounds.settle(0.0, idle=True)
    assert rounds.reported("a", 1, well=True) is None
    failed = rounds.reported("b", 1, well=False)
    assert failed is not None and failed.open == {"c"}
    rounds.offer("b", prepare(1, epoch=2), 0.0)
    rounds.offer("c", prepare(1, epoch=3), 0.0)
    fetching, begun = rounds.settle(0.0, idle=True)
    assert [name for name, _ in fetching] == ["b", "c"]
    assert begun is None


def test_one_that_leaves_takes_no_blame_for_the_others() -> None:
    rounds = gathered("a", "b")
    for name in "ab":
        rounds.offer(name, prepare(1), 0.0)
    rounds.settle(0.0, idle=True)
    failed = rounds.dropped("b")
    assert failed is not None and failed.open == {"a"}
    assert rounds.group.eligible == ["a"]
    assert rounds.group.begin() == CommunicatorRanks(2, {"a": 1}, fresh=True)
    assert rounds.dropped("a") is None


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (GpuFacts(nccl=23007, cuda_major=13), "the hub's 22809 differ"),
        (GpuFacts(nccl=0, cuda_major=13), "the receiver has no NCCL"),
        (GpuFacts(nccl=22809, cuda_major=12), "hub's 13 differ"),
        (
            GpuFacts(nccl=22809, cuda_major=13, variables={"NCCL_PROTO": "LL"}),
            "NCCL_NET, NCCL_PROTO",
        ),
    ],
)
def test_who_would_hang_the_others_is_refused(theirs: GpuFacts, reason: str) -> None:
    assert mismatch(FACTS, FACTS) is None
    assert reason in (mismatch(FACTS, theirs) or "")


@pytest.fixture
def worker() -> Iterator[GpuWorkerProcess]:
    worker = GpuWorkerProcess(0, program=FAKE)
    yield worker
    worker.kill()


def test_an_agent_that_hangs_is_killed_and_another_serves(worker: GpuWorkerProcess) -> None:
    assert worker.call("facts", WAIT_S) == {"did": "facts"}
    with pytest.raises(DeadlineError, match="no answer from the GPU worker"):
        worker.call("join", 0.1, uid="hang")
    assert worker.pid is None
    assert worker.call("join", WAIT_S, uid="good") == {"did": "join"}
    assert worker.starts == 2
    with pytest.raises(UmbraError, match="GPU worker: refused"):
        worker.call("join", WAIT_S, uid="refuse")
    with pytest.raises(PeerLostError, match="ended"):
        worker.call("join", WAIT_S, uid="die")


no_cuda = pytest.mark.skipif(cuda.cuda_unavailable() is None, reason="there is a GPU here")


@no_cuda
def test_without_cuda_the_planes_and_the_check_say_why() -> None:
    for name in ("nccl", "cuda_ipc"):
        reason = unavailable(name)
        assert reason and ("cupy" in reason or "CUDA" in reason)
        with pytest.raises(UsageError, match=f'weight_hub.plane = "{name}" cannot be used: '):
            check_plane(name)
    found = {one.subject: one for one in findings()}
    assert found["plane shm"].text == found["plane tcp"].text == "available"
    assert found["plane nccl"].text == unavailable("nccl")
    assert found["plane nccl"].level == "not looked at"
    assert "the GPU cannot be used" in GpuWorker(0).carry_out({"op": "facts"})["error"]
    assert "no such order" in GpuWorker(0).carry_out({"op": "dance"})["error"]


def config(plane: str) -> WeightHubConfig:
    return msgspec.convert({"plane": plane}, WeightHubConfig)


def test_a_gpu_plane_that_is_set_by_name_is_the_only_one_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "find_gpu", lambda *_, **__: None)
    assert open_planes(config("nccl"), "cuda").offered == []


@no_cuda
def test_a_receiver_that_asks_for_a_gpu_plane_is_told_why_not() -> None:
    for plane, device, offered in (
        ("auto", "cpu", ["shm", "tcp"]),
        ("auto", "cuda:0", ["shm", "tcp"]),
        ("tcp", "cuda:0", ["tcp"]),
        ("shm", "cpu", ["shm"]),
    ):
        planes = open_planes(config(plane), device)
        assert (planes.offered, planes.facts) == (offered, None)
    with pytest.raises(UsageError, match=r'"nccl" cannot be used here: .*(cupy|CUDA)'):
        open_planes(config("nccl"), "cpu")
    for device, gpus, where in (("cpu", 1, "cpu"), ("cuda:0", 2, r"2 \(generator.tensor_parallel")):
        with pytest.raises(
            UsageError, match=rf'"cuda_ipc" needs a receiver on one GPU, .* on {where}'
        ):
            open_planes(config("cuda_ipc"), device, gpus=gpus)


def test_cuda_ipc_is_within_one_gpu_of_one_host() -> None:
    """GPUs of two hosts may be at the same place on their buses."""

    def joins(hub: Side, receiver: Side) -> str | None:
        return obstacle("cuda_ipc", hub, receiver)

    one, other = (
        GpuFacts(nccl=22903, cuda_major=13, device=device)
        for device in ("0000:01:00.0", "0000:02:00.0")
    )
    assert joins(Side("a", one), Side("a", one)) is None
    assert "another GPU" in (joins(Side("a", one), Side("a", other)) or "")
    assert "/dev/shm" in (joins(Side("a", one), Side("b", one)) or "")
    assert joins(Side("a", one), Side("a")) == "the receiver has no GPU"
    assert obstacle("nccl", Side("a"), Side("b", one)) == "the hub has no GPU"
    assert obstacle("nccl", Side("a", one), Side("b", other)) is None


@pytest.mark.parametrize(
    ("configured", "host", "offered", "broken", "found"),
    [
        ("auto", "a", ["tcp", "shm"], {}, "shm"),
        ("auto", "a", ["tcp", "shm"], {"shm": "full"}, "tcp"),
        ("auto", "b", ["tcp", "shm"], {}, "tcp"),
        ("tcp", "a", ["tcp", "shm"], {}, "tcp"),
        ("auto", "b", ["shm"], {}, r"\(shm: the hub's /dev/shm is not the receiver's\)"),
        ("tcp", "a", ["shm"], {}, r"\(plane tcp is set, \['shm'\] were offered\)"),
    ],
)
def test_the_first_plane_that_both_ends_have_is_taken(
    configured: str, host: str, offered: list[str], broken: dict[str, str], found: str
) -> None:
    if found in offered:
        assert choose_plane(configured, Side("a"), Side(host), offered, broken) == found
    else:
        with pytest.raises(RejectedError, match=f"no way to push weights .* {found}"):
            choose_plane(configured, Side("a"), Side(host), offered, broken)
