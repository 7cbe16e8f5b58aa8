"""A weight hub in a thread, with publishers and receivers that tests drive."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import zmq
from fakes.slowness import limit

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.messages import Ping, Pong, Prepare, Role, Subscribed
from umbra.proto.net.io_thread import Channel, IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Server
from umbra.proto.records import Manifest
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.daemon import Daemon
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes.plane import ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import GpuReceiving, StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver, StagedVersion

WAIT_S = limit(20.0)
PACE = Pace(WAIT_S, LEAST_RATE)
PROGRAMS = Path(__file__).parents[1] / "programs"
LAYOUT = build_manifest(
    [("embed", "F32", [300, 16]), ("layer.0", "BF16", [33, 7]), ("norm", "F32", [16])], 4096
)
OTHER_LAYOUT = build_manifest([("embed", "F32", [100, 16])], 4096)


class SmallFrames(WeightHubConfig):
    """A receiver with one connection to each source, and small records."""

    receive_bucket_bytes: int = 8192
    connections: ClassVar[int] = 1


class Bench:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_id: str, folder: Path) -> None:
        self.metrics_path = folder / "metrics.jsonl"
        self._metrics = MetricsFile(self.metrics_path, "weight-hub")
        self._run_id = run_id
        self._context = context
        self.links: dict[str, IoThread] = {}
        self.channels: list[Channel] = []
        self.closers: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._kills = False
        self.server: Server | None = None
        self.endpoint = "tcp://127.0.0.1:*"
        self.security = OPEN  # of the hub

    def start(self, **config: object) -> None:
        """Start a hub; not the first one takes over the address, and knows nobody."""
        self.stop()
        self._stop = threading.Event()
        if self.server is None:
            self.server = Server(self._context, "weight-hub", uuid.uuid4().hex, self.security)
            self.endpoint = self.server.bind(CHANNEL, self.endpoint, ACCEPTS)
        host, _, _ = self.endpoint.rpartition(":")
        options = self.config(**{"listen": f"{host}:*", **config})
        self.hub = WeightHub(self.server, self._run_id, options, self._metrics)
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    @staticmethod
    def config(**values: object) -> WeightHubConfig:
        """A section `weight_hub` for tests."""
        return WeightHubConfig(**{"deadline_s": WAIT_S, **values})  # type: ignore[arg-type]

    def _main(self) -> None:
        while not self._stop.is_set():
            self.hub.step(0.02)
        if not self._kills:
            self.hub.close()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(WAIT_S)
            self._thread = None

    def kill(self) -> Path:
        """End the hub as SIGKILL would; return the path of the arena that it leaves."""
        self._kills = True
        self.stop()
        self._kills = False
        arena = self.hub._arena
        assert arena is not None
        for end in self.hub.planes.ends.values():
            for slot in range(arena.slots):
                end.granted(slot)  # views of the arena keep its lock, while this process lives
            end.close()
        arena.close()
        return arena.path

    def finish(self) -> None:
        """Stop the hub when it has done all that it was told; whoever told it must still be there.

        A peer's messages are done in their order, so an answer comes after those before it.
        """
        for channel in self.channels:
            channel.call(Ping(), Pong, timeout_s=WAIT_S)
        self.stop()

    def channel(self, name: str, security: Security = OPEN, server: Role = "weight_hub") -> Channel:
        link = self.links[name] = IoThread(name, uuid.uuid4().hex, security=security)
        self.closers.append(link.close)
        self.channels.append(link.channel(self.endpoint, "weight hub", server=server))
        return self.channels[-1]

    def publisher(
        self,
        manifest: Manifest = LAYOUT,
        name: str = "trainer",
        channel: Channel | None = None,
    ) -> Publisher:
        publisher = Publisher(channel or self.channel(name), manifest)
        self.closers.append(publisher.close)
        publisher.register(WAIT_S)
        return publisher

    def receiver(
        self,
        name: str,
        planes: Sequence[str] | StagedPlanes = ("shm",),
        host: str = "",
        *,
        channel: Channel | None = None,
        dtype: str = "",
        check_s: float = 0.05,
    ) -> Receiver:
        """Return a subscribed receiver, with small records where `planes` are names."""
        if not isinstance(planes, StagedPlanes):
            planes = StagedPlanes(planes, config=SmallFrames())
        receiver = Receiver(
            channel or self.channel(name), planes, host, dtype=dtype, check_s=check_s, retry_s=0.02
        )
        self.closers.append(receiver.close)
        receiver.subscribe(WAIT_S)
        return receiver

    def move(self, endpoint: str = "") -> None:
        """Tell publishers and receivers where their hub is now."""
        self.endpoint = endpoint or self.endpoint
        for channel in self.channels:
            channel.move(self.endpoint)

    def rows(self) -> list[dict[str, object]]:
        text = self.metrics_path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        for close in reversed(self.closers):
            close()
        self.stop()
        if self.server is not None:
            self.server.close()
        self._metrics.close()


def content(version: int, size: int = LAYOUT.total_bytes) -> bytes:
    return random.Random(version).randbytes(size)


def publish(publisher: Publisher, version: int) -> None:
    publisher.slot(version, WAIT_S)[:] = content(version, publisher.manifest.total_bytes)
    publish_slot(publisher, version, 0.25)


def publish_slot(publisher: Publisher, version: int, snapshot_s: float = 0.0) -> None:
    assert publisher._granted is not None
    arena, slot, _ = publisher._granted
    sums = checksums(publisher.manifest, arena.slot(slot))
    publisher.publish(version, snapshot_s, sums)


def whole(staged: StagedVersion) -> bytes:
    return bytes(staged.data)


def take(receiver: Receiver) -> StagedVersion:
    staged = receiver.wait_first(WAIT_S, threading.Event())
    assert staged is not None
    return staged


Versions = Sequence[bytes] | Mapping[int, bytes]


def load(receiver: Receiver, version: int, versions: Versions = ()) -> None:
    """Load versions as they come until `version`; each is whole: of `versions`, or its content."""
    while True:
        staged = take(receiver)
        size, number = staged.manifest.total_bytes, staged.version
        assert whole(staged) == (versions[number] if versions else content(number, size))
        receiver.committed(staged, 0.125)
        if number == version:
            return


def push(publisher: Publisher, version: int, *receivers: Receiver) -> None:
    """Publish a version, and have all load until it."""
    publish(publisher, version)
    for receiver in receivers:
        load(receiver, version)


class Weights:
    """A trainer whose versions differ by one unit in the last place here and there.

    `share` is that of the elements that change.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.versions: list[bytes] = []
        self._random = np.random.default_rng(0)
        size = publisher.manifest.total_bytes // 2
        self._now = self._random.integers(0, 1 << 16, size, dtype=np.uint16)

    def write(self, share: float = 0.02) -> int:
        """Write the next version into its slot; return its number."""
        count = round(share * self._now.size)
        places = self._random.choice(self._now.size, count, replace=False)
        self._now[places] += self._random.choice(np.array([1, 65535], np.uint16), count)
        version = len(self.versions)
        self.versions.append(self._now.tobytes())
        self.publisher.slot(version, WAIT_S)[:] = self.versions[-1]
        return version

    def publish(self, share: float = 0.02) -> int:
        version = self.write(share)
        publish_slot(self.publisher, version)
        return version

    def load(self, receiver: Receiver, version: int) -> None:
        load(receiver, version, self.versions)


class Engine:
    """Keeps the bytes that it loads, which have to be whole; `under` happens within each load."""

    def __init__(self, receiver: Receiver, versions: Callable[[int], bytes] = content) -> None:
        self.receiver = receiver
        self.under: Callable[[StagedVersion], object] = lambda _: None
        self.stopping = threading.Event()
        self.version, self.loads = -1, 0
        self._versions = versions
        self._held = b""

    def load(self, staged: StagedVersion) -> int | None:
        """Load a version, or one that takes its place; return the one that is served then."""
        loaded = self.receiver.load(staged, self._apply, WAIT_S, self.stopping)
        if loaded is None:
            return None
        assert self._held == self._versions(loaded.version), "not the trainer's weights"
        self.version = loaded.version
        return loaded.version

    def _apply(self, staged: StagedVersion) -> None:
        self.loads += 1
        assert isinstance(staged.data, memoryview)
        half = len(staged.data) // 2
        taken = bytes(staged.data[:half])
        self.under(staged)
        self._held = taken + bytes(staged.data[half:])


class Watched(StagedPlanes):
    """Planes whose ends call `at` with their phase and version: prepared, staging, received."""

    def __init__(self, plane: str, at: Callable[[str, int], object]) -> None:
        super().__init__([plane], config=SmallFrames())
        self._at = at

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        return WatchedEnd(super().open(reply, security), self._at)


class WatchedEnd:
    def __init__(self, real: ReceiverEnd, at: Callable[[str, int], object]) -> None:
        self.close = real.close
        self._receive, self._at = real.receive, at

    def receive(self, message: Prepare) -> Receiving:
        self._at("prepared", message.version)
        steps = self._receive(message)
        while True:
            try:
                bucket = next(steps)
            except StopIteration as end:
                self._at("received", message.version)
                return end.value
            if bucket is not None:
                self._at("staging", message.version)
            yield bucket


class Relay:
    """A daemon that fetches from the hub of `bench`, on a host of its own name, in a thread."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        *,
        security: Security = OPEN,
        gpu: GpuReceiving | None = None,
        **config: Any,
    ) -> None:
        self.metrics_path = bench.metrics_path.with_name(f"{name}.jsonl")
        self._metrics = MetricsFile(self.metrics_path, name)
        self.daemon = Daemon(
            name,
            bench.config(**config),
            self._metrics,
            upstream=bench.endpoint,
            host=name,
            gpu=gpu,
            security=security,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.daemon.run, args=(name, self._stopping, WAIT_S))
        self._thread.start()
        bench.closers.append(self.stop)
        while name not in bench.hub.protocol.serving:
            self._thread.join(0.01)
            assert self._thread.is_alive(), f"no {name}"

    @property
    def buckets(self) -> str:
        assert self.daemon.hub is not None
        return self.daemon.hub.planes.open_tcp().buckets.endpoint

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)
        self._metrics.close()
