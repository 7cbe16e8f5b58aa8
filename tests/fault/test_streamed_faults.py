"""A streamed load breaks off: the old version is served again, whole, or the generator leaves."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.generating import Generating, Policy
from fakes.hub_bench import PACE, WAIT_S, Bench
from fault.test_weight_push_faults import PLANES, HubProcess

from umbra.proto.errors import PeerLostError
from umbra.proto.net.io_thread import IoThread
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.trainer.make_model import make_model
from umbra.services.weights.arena import Arena
from umbra.services.weights.planes.bucket_store import SMALLEST_FRAME
from umbra.services.weights.planes.receiving import StreamedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

pytestmark = pytest.mark.fault
AFTER = 3  # buckets


class Interrupted:
    """An engine with something that happens, once, after some buckets of a version."""

    def __init__(self, engine: TorchEngine, version: int, happens: Callable[[], None]) -> None:
        self._engine = engine
        self._at = version
        self._happens = happens
        self._happened = False

    @property
    def version(self) -> int:
        return self._engine.version

    def load(self, manifest: Any, parts: Iterable[Any], version: int, policy: Any) -> list[Any]:
        def watched() -> Iterator[Any]:
            for index, part in enumerate(parts):
                if index == AFTER and version == self._at and not self._happened:
                    self._happened = True
                    self._happens()
                yield part

        return self._engine.load(manifest, watched(), version, policy)


class World:
    """A hub, a trainer, and a generator to which something happens while version 1 is loaded."""

    def __init__(self, endpoint: str, model_dir: Path, plane: str) -> None:
        self.happens: Callable[[], None] = lambda: None
        self.links = [IoThread("trainer", uuid.uuid4().hex), IoThread("gen-0", uuid.uuid4().hex)]
        self.up, self.down = (link.channel(endpoint, "weight hub") for link in self.links)
        self.policy = Policy(model_dir)
        self.publisher = Publisher(self.up, self.policy.manifest)
        self.publisher.register(WAIT_S)
        # The smallest messages, so that most of a version is not under way when something happens.
        planes = StreamedPlanes([plane], SMALLEST_FRAME, PACE)
        self.receiver = Receiver(self.down, planes, check_s=0.05, retry_s=0.02)
        self.receiver.subscribe(WAIT_S)
        self.generator = Generating(
            self.policy,
            model_dir,
            self.receiver,
            lambda engine: cast(Any, Interrupted(engine, 1, lambda: self.happens())),
        )

    def begin(self) -> World:
        """Version 0 is served."""
        self.generator.until(self.publish())
        return self

    def publish(self) -> int:
        version = self.policy.write(self.publisher)
        self.place = self.publisher.place
        self.publisher.publish(version, 0.0)
        return version

    def spoil(self, place: tuple[str, int]) -> None:
        """Change a byte of the last bucket of a slot, whoever reads it."""
        path, slot = place
        arena = Arena.attach(path, slot_bytes=self.policy.manifest.total_bytes)
        start, _ = self.policy.manifest.buckets[-1]
        arena.slot(slot)[start] ^= 1
        arena.close()

    def close(self) -> None:
        self.generator.close()
        self.receiver.close()
        self.publisher.close()
        for link in self.links:
            link.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is large beside the smallest message."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=64, ff=128)
    return path


@pytest.fixture
def world(bench: Bench, model_dir: Path) -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def start(plane: str) -> World:
        bench.start(plane=plane)
        made.append(World(bench.endpoint, model_dir, plane))
        return made[-1].begin()

    yield start
    for one in made:
        one.close()


@PLANES
def test_the_old_version_is_served_again(
    bench: Bench, world: Callable[[str], World], plane: str
) -> None:
    """The last bucket of version 1 spoils while the first ones are loaded, and is mended later."""
    one = world(plane)
    one.happens = lambda: one.spoil(one.place)
    version = one.publish()
    one.generator.wait(lambda: one.generator.restored > 0, "break")
    one.generator.goes_on()
    assert one.generator.engine.version == 0
    one.spoil(one.place)
    one.generator.until(version)
    one.generator.until(one.publish())
    assert bench.hub.protocol.counters["failed"] >= 1


@PLANES
def test_it_leaves_where_the_old_version_is_gone_too(
    bench: Bench, world: Callable[[str], World], plane: str
) -> None:
    one = world(plane)
    before = one.place

    def both() -> None:
        one.spoil(before)
        one.spoil(one.place)

    one.happens = both
    one.publish()
    with pytest.raises(
        PeerLostError, match=r"version 1 broke off .*checksum.* version 0 is not there"
    ):
        one.generator.until(1)
    look = threading.Event()
    while bench.hub.protocol.counters["failed"] == 0:  # it has said so
        assert not look.wait(0.01)


@PLANES
def test_the_hub_is_killed_while_a_version_is_loaded(
    run_id: str, model_dir: Path, plane: str
) -> None:
    """Shared memory outlives the hub, so the load goes on; a socket does not, so it leaves."""
    hub = HubProcess("tcp://127.0.0.1:*", run_id, plane)
    one = World(hub.endpoint, model_dir, plane)
    try:
        one.begin().happens = hub.kill
        one.publish()
        if plane == "shm":
            one.generator.until(1)
        else:
            with pytest.raises(PeerLostError, match="started again it gets the newest version"):
                one.generator.until(1)
        hub = HubProcess(hub.endpoint, run_id, plane)
        one.up.move(hub.endpoint)
        one.down.move(hub.endpoint)
        version = one.publish()
        if plane == "shm":
            one.generator.until(version)
    finally:
        one.close()
        hub.process.terminate()
        hub.process.communicate(timeout=WAIT_S)
