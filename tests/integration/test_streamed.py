"""Receiving in mode `streamed`: from the hub straight into the model, a few buckets at a time."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from fakes.slowness import seconds
from torch import nn

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import PeerLostError, UsageError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.modeling.weights import WeightTable
from umbra.services.process.metrics import MetricsFile
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.arena import Arena, remove_leftovers
from umbra.services.weights.gpu.worker_process import result
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes.receiving import StreamedPlanes
from umbra.services.weights.planes.shm import ShmStream
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver, StagedVersion

WAIT_S = seconds(20.0)
PACE = Pace(WAIT_S, LEAST_RATE)


def make_model(rows: int = 65) -> nn.Module:
    return nn.Sequential(nn.Linear(33, rows), nn.Linear(65, 7), nn.LayerNorm(7))


class World:
    """A hub in a thread, a trainer, and a generator that streams."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], plane: str) -> None:
        torch.manual_seed(0)
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.policy, self.served = make_model(), make_model()
        self.table = WeightTable(self.served)
        self.manifest = build_manifest(tensor_layout(self.policy, "float32"), 1024)
        self.server = Server(context, "weight-hub", "h1")
        endpoint = self.server.bind(CHANNEL, "tcp://127.0.0.1:*", ACCEPTS)
        metrics = MetricsFile(None, "weight-hub")
        self.hub = WeightHub(self.server, self.run_id, WeightHubConfig(), metrics)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._main)
        self.thread.start()
        self.links = [IoThread("trainer", "t1"), IoThread("a", "a1")]
        trainer, generator = (link.channel(endpoint, "weight hub") for link in self.links)
        self.publisher = Publisher(trainer, self.manifest)
        self.publisher.register(WAIT_S)
        planes = StreamedPlanes([plane], 4096, PACE)
        self.receiver = Receiver(generator, planes, retry_s=0.02)
        self.receiver.subscribe(WAIT_S)

    def _main(self) -> None:
        while not self.stop.is_set():
            self.hub.step(0.02)
        self.hub.close()

    @torch.no_grad()
    def publish(self, version: int) -> tuple[str, int]:
        slot = self.publisher.slot(version, WAIT_S)
        place = self.publisher.place
        for parameter in self.policy.parameters():
            parameter.add_(version + 1)
        write_shards(self.policy, self.manifest, slot)
        self.publisher.publish(version, 0.0)
        return place

    def staged(self) -> StagedVersion:
        staged = self.receiver.wait_first(WAIT_S, threading.Event())
        assert staged is not None
        return staged

    def load(self, staged: StagedVersion) -> None:
        self.table.load(staged.manifest, staged.parts())

    def equal(self) -> bool:
        ours, theirs = self.policy.state_dict(), self.served.state_dict()
        return all(torch.equal(ours[name], theirs[name]) for name in ours)

    def close(self) -> None:
        self.receiver.close()
        self.publisher.close()
        for link in self.links:
            link.close()
        self.stop.set()
        self.thread.join(WAIT_S)
        self.server.close()


@pytest.fixture(params=["shm", "tcp"])
def world(
    zmq_context: zmq.Context[zmq.Socket[bytes]], request: pytest.FixtureRequest
) -> Iterator[World]:
    world = World(zmq_context, request.param)
    yield world
    world.close()
    assert remove_leftovers(world.run_id) == []


def test_versions_are_loaded_bit_for_bit_and_hold_no_second_copy(world: World) -> None:
    for version in range(3):
        world.publish(version)
        staged = world.staged()
        assert staged.version == version
        world.load(staged)
        world.receiver.committed(staged, 0.0)
        assert world.equal()


def test_the_slot_is_not_written_until_it_is_loaded(world: World) -> None:
    world.publish(0)
    staged = world.staged()
    world.publish(1)  # the other slot
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(world.publisher.slot(2, WAIT_S)))
    waiting.start()
    world.load(staged)  # slot 0 is whole although version 1 is out and version 2 wants it
    assert got == []
    world.receiver.committed(staged, 0.0)
    staged = world.staged()  # version 1: should it break off, version 0 is loaded again
    world.load(staged)
    assert got == []
    world.receiver.committed(staged, 0.0)
    waiting.join(WAIT_S)
    assert len(got) == 1


def test_a_load_that_breaks_off_says_so(world: World) -> None:
    path, slot = world.publish(0)
    staged = world.staged()
    arena = Arena.attach(path, slot_bytes=world.manifest.total_bytes)
    start, _ = world.manifest.buckets[3]
    arena.slot(slot)[start] ^= 1  # what no trainer does while the slot is read
    with pytest.raises(PeerLostError, match="checksum of bucket 3"):  # tcp: again and again
        world.load(staged)
    arena.close()
    world.receiver.committed(staged, 0.0, error="broken")


def test_what_does_not_fit_is_refused_before_anything_is_changed(world: World) -> None:
    world.publish(0)
    staged = world.staged()
    other = make_model(rows=64)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UsageError, match=r"shape: 0.weight \[65, 33\] instead of \[64, 33\]"):
        WeightTable(other).load(staged.manifest, staged.parts())
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    world.receiver.committed(staged, 0.0, error="does not fit")


def test_the_ring_is_small(world: World, tmp_path: Path) -> None:
    world.publish(0)
    staged = world.staged()
    seen = [len(part) for part in staged.parts()]
    assert seen == [end - start for start, end in world.manifest.buckets]
    world.receiver.committed(staged, 0.0)


def test_loads_use_the_mapping_by_which_versions_were_verified(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would fault at every page while generation waits."""
    attached: list[Path] = []
    attach = Arena.attach

    def noted(path: Path, **options: Any) -> Arena:
        attached.append(path)
        return attach(path, **options)

    reply = Subscribed(manifest=world.manifest, plane="shm", path=world.publisher.arena[0])
    monkeypatch.setattr(Arena, "attach", noted)
    data = world.publisher.slot(0, WAIT_S)
    sums = checksums(world.manifest, data)
    stream = ShmStream(reply)
    prepare = Prepare(epoch=1, version=0, slot=world.publisher.place[1], checksums=sums)
    receipt = result(stream.receive(prepare, 0))
    assert receipt.parts is not None
    whole = [bytes(bucket) for bucket in receipt.parts()]
    assert len(attached) == 1

    load = receipt.parts()
    begun = [bytes(next(load))]
    stream.close()  # the receiver gets another end meanwhile
    assert begun + [bytes(bucket) for bucket in load] == whole
    assert len(attached) == 1
    assert [bytes(bucket) for bucket in receipt.parts()] == whole, "also afterwards"
    assert len(attached) == 2
