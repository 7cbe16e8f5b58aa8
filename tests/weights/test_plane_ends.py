"""Planes cuda_ipc, whose hub uploads a version once for all that wait for it, and shm."""

import os
import threading
import time
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.hub_bench import LAYOUT, PACE, PROGRAMS, WAIT_S
from fakes.slowness import until

from umbra.proto.errors import PeerLostError, RejectedError
from umbra.proto.messages import Prepare, Subscribe, Subscribed
from umbra.proto.records import BucketsAt
from umbra.services.config import WeightHubConfig
from umbra.services.weight_hub.hub_planes import HubPlanes
from umbra.services.weight_hub.push import HubPeer
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.worker import GpuWorkerProcess, result
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes.cuda_ipc import IpcHub
from umbra.services.weights.planes.plane import ShmReceiver
from umbra.services.weights.verify import SlotGuard


def prepare(version: int) -> Prepare:
    return Prepare(epoch=1, version=version, slot=version % 2, checksums=[version])


class Uploading(IpcHub):
    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)
        self.begun: list[int] = []
        self.woken = threading.Event()
        super().__init__(Mock(), PACE, self.woken.set)

    def _upload(self, prepare: Prepare) -> bytes:
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
        guard = SlotGuard(arena.sequence(1), arena.check, LAYOUT, arena.slot(1), sums)
        assert guard.is_readable
        os.truncate(arena.path, 4096)
        assert not guard.is_readable, "to read it would be a SIGBUS"
        steps = end.receive(Prepare(epoch=1, version=0, slot=1, checksums=sums))
        assert "has become shorter" in result(steps).error
    arena.unlink()


def test_who_closes_waits_for_no_upload() -> None:
    """1. The worker hangs in an upload. 2. The hub ends."""
    worker = GpuWorkerProcess(0, program=(str(PROGRAMS / "fake_gpu_worker.py"),))
    hub = IpcHub(worker, PACE)
    hub.layout(Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=2), LAYOUT)
    hub.prepare("a", prepare(0), 0.0)
    assert hub.poll(0.0) == []
    until(lambda: worker.memory is not None, lambda: worker.pid)
    began = time.monotonic()
    hub.close()
    assert time.monotonic() - began < WAIT_S / 2 <= PACE.limit_s(0) / 2
    assert worker.pid is None


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
