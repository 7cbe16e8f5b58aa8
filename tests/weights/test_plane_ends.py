"""The ends of planes without a GPU: which one is chosen, who shares an upload or a broadcast."""

import os
import threading
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from fakes.hub_bench import LAYOUT, PACE, WAIT_S
from fakes.slowness import until

from umbra.deploy.check.machine import findings
from umbra.proto.errors import PeerLostError, RejectedError, UsageError
from umbra.proto.messages import Prepare, Ready, Subscribe, Subscribed
from umbra.proto.records import BucketsAt, GpuFacts
from umbra.services.config import WeightHubConfig
from umbra.services.weight_hub.hub_planes import HubPlanes
from umbra.services.weight_hub.push import HubPeer
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import GpuWorker, result
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes import receiving
from umbra.services.weights.planes.cuda_ipc import IpcHub
from umbra.services.weights.planes.nccl import CommunicatorRanks, NcclGroup, NcclHub, Rounds
from umbra.services.weights.planes.plane import (
    Settled,
    ShmHub,
    ShmReceiver,
    Side,
    check_plane,
    choose_plane,
    mismatch,
    obstacle,
    unavailable,
)
from umbra.services.weights.planes.receiving import open_planes
from umbra.services.weights.verify import SlotGuard


def prepare(version: int, epoch: int = 1) -> Prepare:
    return Prepare(epoch=epoch, version=version, slot=version % 2, checksums=[version])


# -- nccl: who is in the communicator -------------------------------------------------------------


def joined(group: NcclGroup, *names: str, incarnation: str = "1") -> NcclGroup:
    for name in names:
        group.join(name, incarnation)
    return group


def test_every_change_of_membership_makes_a_communicator_of_the_next_epoch() -> None:
    group = NcclGroup(epoch=10)
    assert group.eligible == []

    def begins(epoch: int, *names: str, fresh: bool = True) -> None:
        ranks = {name: rank for rank, name in enumerate(names, start=1)}
        made = group.begin()
        assert made == CommunicatorRanks(epoch, ranks, fresh) and made.size == len(names) + 1

    joined(group, "a")
    begins(11, "a")
    group.worked()
    begins(11, "a", fresh=False)
    joined(group, "b")
    begins(12, "a", "b")
    group.worked()
    group.leave("a")
    begins(13, "b")
    group.worked()
    joined(group, "b", incarnation="2")
    begins(14, "b")
    group.worked()
    group.broke()
    begins(15, "b")
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
    group = joined(NcclGroup(), *"abcd")
    assert rounds_until_settled(group, {"c"}) == 2, "once together, once alone"
    assert group.eligible == ["a", "b", "d"]
    joined(group, "c")
    assert "c" not in group.eligible, "it is the same process, and would hang again"
    joined(group, "c", incarnation="2")
    assert rounds_until_settled(group, set()) == 0
    assert group.eligible == ["a", "b", "d", "c"]


def test_one_that_worked_and_hangs_now_is_found_as_well() -> None:
    group = joined(NcclGroup(), *"abc")
    assert rounds_until_settled(group, set()) == 0
    joined(group, "d")
    assert rounds_until_settled(group, {"d"}) == 1, "the only one who is not proven"
    group.leave("d")
    group.leave("c")
    assert rounds_until_settled(group, {"a"}) == 2
    assert group.eligible == ["b"]


def gathered(*names: str, offered: bool = False) -> Rounds:
    """Rounds of members, which all wait for version 1 where it is `offered`."""
    group = joined(NcclGroup(), *names)
    rounds = Rounds(group, gather_s=1.0, start_s=5.0, ready_at=0.0)
    for name in names if offered else ():
        rounds.offer(name, prepare(1), 0.0)
    return rounds


def test_who_could_not_receive_ends_the_broadcast_for_all() -> None:
    hub = NcclHub(Mock(), 1024, PACE, 0, Mock())
    hub._rounds = gathered("a", "b", offered=True)
    assert hub._rounds.settle(0.0, idle=True)[1]
    error = "out of memory"
    hub.staged("a", Ready(epoch=1, version=1, wire_s=0.0, stage_s=0.0, error=error))
    assert hub._outcomes == [Settled("b", prepare(1), f"a could not receive: {error}")]
    assert hub._thread.cancelled.is_set()
    hub.close()


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
    rounds = gathered("a", "b", "c", offered=True)
    rounds.settle(0.0, idle=True)
    assert rounds.reported("a", 1, well=True) is None
    failed = rounds.reported("b", 1, well=False)
    assert failed is not None and failed.open == {"c"}
    rounds.offer("b", prepare(1, epoch=2), 0.0)
    rounds.offer("c", prepare(1, epoch=3), 0.0)
    fetching, begun = rounds.settle(0.0, idle=True)
    assert ([name for name, _ in fetching], begun) == (["b", "c"], None)


def test_one_that_leaves_takes_no_blame_for_the_others() -> None:
    rounds = gathered("a", "b", offered=True)
    rounds.settle(0.0, idle=True)
    failed = rounds.dropped("b")
    assert failed is not None and failed.open == {"a"}
    assert rounds.group.eligible == ["a"]
    assert rounds.group.begin() == CommunicatorRanks(2, {"a": 1}, fresh=True)
    assert rounds.dropped("a") is None


# -- the choice of a plane ------------------------------------------------------------------------

ONE, OTHER = (
    GpuFacts(nccl=22809, cuda_major=13, variables={"NCCL_NET": "Socket"}, device=device)
    for device in ("0000:01:00.0", "0000:02:00.0")
)


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        ({"nccl": 23007}, "the hub's 22809 differ"),
        ({"nccl": 0}, "the receiver has no NCCL"),
        ({"cuda_major": 12}, "hub's 13 differ"),
        ({"variables": {"NCCL_PROTO": "LL"}}, "NCCL_NET, NCCL_PROTO"),
    ],
)
def test_who_would_hang_the_others_is_refused(differs: dict[str, Any], reason: str) -> None:
    assert mismatch(ONE, ONE) is None
    assert reason in (mismatch(ONE, msgspec.structs.replace(ONE, **differs)) or "")


def test_cuda_ipc_is_within_one_gpu_of_one_host() -> None:
    """GPUs of two hosts may be at the same place on their buses."""
    hub = Side("a", ONE)
    assert obstacle("cuda_ipc", hub, hub) is obstacle("nccl", hub, Side("b", OTHER)) is None
    assert "another GPU" in (obstacle("cuda_ipc", hub, Side("a", OTHER)) or "")
    assert "/dev/shm" in (obstacle("cuda_ipc", hub, Side("b", ONE)) or "")
    assert obstacle("cuda_ipc", hub, Side("a")) == "the receiver has no GPU"
    assert obstacle("nccl", Side("a"), Side("b", ONE)) == "the hub has no GPU"


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


no_cuda = pytest.mark.skipif(cuda.cuda_unavailable() is None, reason="there is a GPU here")


def config(plane: str) -> WeightHubConfig:
    return msgspec.convert({"plane": plane}, WeightHubConfig)


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


@no_cuda
def test_a_receiver_that_asks_for_a_gpu_plane_is_told_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for plane, device, offered in (
        ("auto", "cpu", ["shm", "tcp"]),
        ("auto", "cuda:0", ["shm", "tcp"]),
        ("tcp", "cuda:0", ["tcp"]),
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
    monkeypatch.setattr(receiving, "find_gpu", lambda *_, **__: None)
    assert open_planes(config("nccl"), "cuda").offered == [], "only the plane set by name"


def test_a_receiver_that_left_has_no_plane() -> None:
    planes = HubPlanes(WeightHubConfig(), "here")
    planes.subscribe(HubPeer("a", "1"), Subscribe(host="here", planes=["shm"]))
    assert planes.plane_of("a") == "shm"
    planes.left("a")
    assert (planes.plane_of("a"), planes.chosen) == ("", {})
    planes.subscribe(HubPeer("a", "1"), Subscribe(host="elsewhere", planes=["tcp"]))
    assert list(planes.open_tcp()._fetchers) == ["a"]
    planes.subscribe(HubPeer("a", "2"), Subscribe(host="here", planes=["shm"]))
    assert not planes.open_tcp()._fetchers, "it has another plane now"
    planes.close()


def test_versions_of_several_hosts_are_fetched_from_all_or_from_a_relay() -> None:
    divided = build_manifest([("a", "F32", [4, 64])], 1024, {"a": [(2, 0), (4, 1)]})
    planes = HubPlanes(WeightHubConfig(), "here")
    planes.layout(Arena.anonymous(slot_bytes=divided.total_bytes, slots=2), divided)

    def joins(name: str, host: str, *offered: Any, **more: Any) -> str:
        return planes.subscribe(
            HubPeer(name, "1"), Subscribe(host=host, planes=list(offered), **more)
        )

    with pytest.raises(RejectedError, match="offers no plane tcp; start a relay on its host"):
        joins("a", "here", "shm")
    assert (joins("a", "here", "shm", "tcp"), planes.plane_of("a")) == ("", "tcp")
    at = BucketsAt(endpoint="tcp://far:2", key=bytes(32))
    assert joins("relay", "far", "tcp", serves="tcp://far:1", buckets=at) == ""
    assert joins("b", "far", "tcp") == "tcp://far:1"
    assert joins("b", "far", "tcp", avoid="tcp://far:1") == ""
    planes.check_layout(divided)
    planes.close()
    alone = HubPlanes(WeightHubConfig(plane="shm"), "here")
    alone.check_layout(LAYOUT)
    with pytest.raises(RejectedError, match="it takes weights from one host only"):
        alone.check_layout(divided)
    alone.close()


# -- what an end does -----------------------------------------------------------------------------


class Uploading(IpcHub):
    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)
        self.begun: list[int] = []
        self.woken = threading.Event()
        super().__init__(Mock(), PACE, self.woken.set)

    def _handle(self, prepare: Prepare) -> bytes:
        self.begun.append(prepare.version)
        assert self.may_end.acquire(timeout=WAIT_S)
        if prepare.version == 9:
            raise PeerLostError("damaged")
        return b"handle"

    def wants(self, **versions: int) -> None:
        for name, version in versions.items():
            assert self.prepare(name, prepare(version), 0.0) == ()
        assert self.poll(0.0) == []

    def ended(self) -> list[tuple[str, int, str]]:
        """Let the call under way end; who is settled then."""
        self.may_end.release()
        assert self.woken.wait(WAIT_S)
        self.woken.clear()
        return [(s.receiver, s.prepare.version, s.error) for s in self.poll(0.0)]


def test_who_waits_shares_an_upload_and_who_comes_later_has_it() -> None:
    hub = Uploading()
    hub.wants(a=0, b=0, late=2)
    hub.left("b")
    assert hub.ended() == [("a", 0, "")]
    hub.wants(c=2)
    assert hub.ended() == [("late", 2, ""), ("c", 2, "")]
    assert [s.prepare.memory for s in hub.prepare("d", prepare(2), 0.0)] == [b"handle"]
    hub.wants(a=9, b=4)
    assert hub.ended() == [("a", 9, "damaged")], "b waits for another one"
    hub.granted(0)
    assert hub.ended() == [], "its bytes may be of two versions"
    hub.granted(1)
    assert hub.ended() == [("b", 4, "")]
    assert hub.begun == [0, 2, 9, 4, 4]
    hub.close()


def test_a_version_in_its_slot_is_verified_once_unless_it_is_given_up() -> None:
    arena = Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=1)
    hub = ShmHub()
    hub.layout(arena, LAYOUT)
    sums = checksums(LAYOUT, arena.slot(0))
    message = Prepare(epoch=1, version=0, slot=0, checksums=sums)

    def outcome(prepare: Prepare) -> Settled:
        assert hub.prepare("a", prepare, 0.0) == ()
        return until(lambda: hub.poll(0.0), lambda: hub)[0]

    assert outcome(message) == Settled("a", message)
    arena.slot(0)[5000] ^= 1
    assert hub.prepare("b", message, 0.0) == (Settled("b", message),), "nobody may write it"
    hub.granted(0)
    assert "checksum of bucket 1 [4032, 8064) is wrong" in outcome(message).error
    hub.close()
    with pytest.raises(PeerLostError, match="was cancelled"):
        hub._handle(message)


def test_a_receiver_of_shared_memory_says_what_is_wrong_with_it(run_id: str) -> None:
    arena = Arena.create(run_id, "shm", slot_bytes=LAYOUT.total_bytes, slots=2)
    reply = Subscribed(manifest=LAYOUT, plane="shm", path=str(arena.path))
    sums = checksums(LAYOUT, arena.slot(1))
    with closing(arena), closing(ShmReceiver(reply)) as end:
        for slot, error in ((1, ""), (2, "slot 2 of an arena"), (1, "its slot was written again")):
            steps = end.receive(Prepare(epoch=1, version=0, slot=slot, checksums=sums))
            came = [] if slot == 2 else [next(steps)]
            if came and error:
                arena.begin(slot)
            while True:
                try:
                    came.append(next(steps))
                except StopIteration as done:
                    receipt = done.value
                    break
            assert came == ([] if slot == 2 else list(range(len(LAYOUT.buckets))))
            assert receipt.error.startswith(error) and bool(receipt.error) == bool(error)
            assert (receipt.guard is None, receipt.data is None) == (bool(error), bool(error))
            assert receipt.stage_s > 0
        arena.end(1)
        guard = SlotGuard(arena.sequence(1), arena.check)
        assert guard.is_readable
        os.truncate(arena.path, 4096)
        assert not guard.is_readable, "to read it would be a SIGBUS"
        steps = end.receive(Prepare(epoch=1, version=0, slot=1, checksums=sums))
        assert "has become shorter" in result(steps).error
    arena.unlink()
