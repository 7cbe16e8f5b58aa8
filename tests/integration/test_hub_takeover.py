"""A hub dies without a word and another takes its place: what trainer and receivers make of it."""

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.hub_bench import publish_slot, whole
from fakes.slowness import limit

from umbra.proto.errors import RejectedError
from umbra.proto.net.channel import Channel
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.arena import Arena, remove_leftovers
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

WAIT_S = limit(20.0)
LAYOUT = build_manifest([("embed", "F32", [300, 16]), ("norm", "F32", [16])], 4096)


class Hubs:
    """One hub after the other, each at an address of its own, and who is connected to them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_id: str) -> None:
        self.run_id = run_id
        self._context = context
        self._channels: list[Channel] = []
        self._closers: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self.start()

    def start(self, slots: int = 2) -> None:
        self._server = Server(self._context, "weight-hub", uuid.uuid4().hex)
        self.endpoint = self._server.bind(CHANNEL, "tcp://127.0.0.1:*", ACCEPTS)
        config = WeightHubConfig(deadline_s=WAIT_S, slots=slots)
        self.hub = WeightHub(self._server, self.run_id, config, MetricsFile(None, "weight-hub"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def _main(self) -> None:
        while not self._stop.is_set():
            self.hub.step(0.02)

    def die(self) -> Path:
        """End as SIGKILL would: the lock on the arena is gone, its file is not; its path."""
        self._stop.set()
        self._thread.join(WAIT_S)
        self._server.close()
        arena = self.hub._arena
        assert arena is not None
        arena.close()
        return arena.path

    def replace(self, slots: int = 2) -> None:
        """Another hub, and everybody hears of it."""
        self.start(slots)
        for channel in self._channels:
            channel.move(self.endpoint)

    def channel(self, name: str) -> Channel:
        link = IoThread(name, uuid.uuid4().hex)
        self._closers.append(link.close)
        channel = link.channel(self.endpoint, "weight hub")
        self._channels.append(channel)
        return channel

    def publisher(self) -> Publisher:
        publisher = Publisher(self.channel("trainer"), LAYOUT)
        self._closers.append(publisher.close)
        publisher.register(WAIT_S)
        return publisher

    def receiver(self, name: str) -> Receiver:
        receiver = Receiver(self.channel(name), StagedPlanes(), check_s=60.0, retry_s=0.02)
        self._closers.append(receiver.close)
        receiver.subscribe(WAIT_S)
        return receiver

    def close(self) -> None:
        for close in reversed(self._closers):
            close()
        self._stop.set()
        self._thread.join(WAIT_S)
        self.hub.close()
        self._server.close()


@pytest.fixture
def hubs(zmq_context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Hubs]:
    hubs = Hubs(zmq_context, f"test-{uuid.uuid4().hex[:8]}")
    yield hubs
    hubs.close()
    assert remove_leftovers(hubs.run_id) == []


def content(version: int) -> bytes:
    return bytes((version + i) % 251 for i in range(LAYOUT.total_bytes))


def publish(publisher: Publisher, version: int) -> None:
    publisher.slot(version, WAIT_S)[:] = content(version)
    publish_slot(publisher, version)


def load(receiver: Receiver, version: int) -> None:
    staged = receiver.wait_first(WAIT_S, threading.Event())
    assert staged is not None
    assert (staged.version, whole(staged)) == (version, content(version))
    receiver.committed(staged, 0.0)


@pytest.mark.parametrize("slots", [2, 3])
def test_an_arena_that_is_gone_is_written_again(hubs: Hubs, slots: int) -> None:
    """Removed by somebody, or of another number of slots: the trainer copies what it has."""
    publisher = hubs.publisher()
    receiver = hubs.receiver("a")
    publish(publisher, 0)
    load(receiver, 0)
    path = hubs.die()
    if slots == 2:
        path.unlink()
    hubs.replace(slots)
    load(receiver, 0)
    assert not path.exists()
    publish(publisher, 1)
    load(receiver, 1)


@pytest.mark.parametrize("arena_stays", [True, False])
def test_what_is_being_written_is_published_to_the_new_hub(hubs: Hubs, arena_stays: bool) -> None:
    publisher = hubs.publisher()
    receiver = hubs.receiver("a")
    publish(publisher, 0)
    load(receiver, 0)
    slot = publisher.slot(1, WAIT_S)
    path = hubs.die()
    if not arena_stays:
        path.unlink()
    hubs.replace()
    slot[:] = content(1)
    publish_slot(publisher, 1)
    staged = receiver.wait_first(WAIT_S, threading.Event())
    assert staged is not None
    if staged.version == 0:  # taken over, and pushed before the trainer was done
        receiver.committed(staged, 0.0)
        load(receiver, 1)
    else:
        assert whole(staged) == content(1)
        receiver.committed(staged, 0.0)
    publish(publisher, 2)
    load(receiver, 2)


def test_a_trainer_that_comes_back_after_the_hub_starts_afresh(hubs: Hubs) -> None:
    publish(hubs.publisher(), 5)
    path = hubs.die()
    hubs.start()
    again = hubs.publisher()
    assert not path.exists(), "nobody has it any more"
    publish(again, 0)
    load(hubs.receiver("a"), 0)


def test_only_an_arena_of_the_run_whose_hub_is_dead_is_taken_over(hubs: Hubs) -> None:
    hubs.publisher()
    arena = hubs.hub._arena
    assert arena is not None
    size = LAYOUT.total_bytes
    for run_id, path in (
        (hubs.run_id, arena.path),  # its hub lives
        ("another", arena.path),
        (hubs.run_id, f"/dev/shm/umbra-{hubs.run_id}-nothing"),
    ):
        with pytest.raises(Exception, match=r"holds|no arena of run|cannot open"):
            Arena.adopt(run_id, path, slot_bytes=size)


def test_a_trainer_that_was_replaced_does_not_come_back(hubs: Hubs) -> None:
    old = hubs.publisher()
    publish(old, 0)
    new = hubs.channel("trainer-2")
    newer = Publisher(new, LAYOUT)
    newer.register(WAIT_S)
    with pytest.raises(RejectedError, match="trainer-2 has registered since trainer did"):
        old.slot(1, WAIT_S)
    newer.close()
