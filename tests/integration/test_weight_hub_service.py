"""Hub, publisher and receivers over real sockets and real shared memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.messages import (
    CONTROL,
    DATA,
    ArenaReady,
    Heartbeat,
    HeartbeatAck,
    HubStatus,
    HubStatusRequest,
    Join,
    Leave,
    Ok,
    Ping,
    Pong,
    Prepare,
    RegisterManifest,
    Welcome,
)
from umbra.proto.records import Manifest
from umbra.services.runtime.arena import SHM, remove_leftovers
from umbra.services.runtime.channel import Channel
from umbra.services.runtime.config import WeightHub as WeightHubConfig
from umbra.services.runtime.link import Link
from umbra.services.runtime.manifest import build_manifest
from umbra.services.runtime.metrics import MetricsFile
from umbra.services.runtime.publisher import Publisher
from umbra.services.runtime.receiver import Receiver, StagedVersion
from umbra.services.runtime.server import Server
from umbra.services.weight_hub.planes import PLANES, check_plane, choose_plane
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub

WAIT_S = 20.0
PROGRAMS = Path(__file__).parents[1] / "programs"
LAYOUT = build_manifest(
    [("embed", "F32", [300, 16]), ("layer.0", "BF16", [33, 7]), ("norm", "F32", [16])], 4096
)
OTHER_LAYOUT = build_manifest([("embed", "F32", [100, 16])], 4096)


class Bench:
    """A hub in a thread, and whoever connects to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_id: str, folder: Path) -> None:
        self.metrics_path = folder / "metrics.jsonl"
        self._metrics = MetricsFile(self.metrics_path, "weight-hub")
        self._run_id = run_id
        self._context = context
        self.closers: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.server: Server | None = None
        self.endpoint = "tcp://127.0.0.1:*"

    def start(self, **config: object) -> None:
        """Start a hub; not the first one takes over the address, and knows nobody."""
        self.stop()
        self._stop = threading.Event()
        if self.server is None:
            self.server = Server(self._context, "weight-hub", uuid.uuid4().hex)
            self.endpoint = self.server.bind(CHANNEL, self.endpoint, ACCEPTS)
        options = self.config(**config)
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
        self.hub.close()

    def stop(self) -> None:
        """Stop the hub."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(WAIT_S)
            self._thread = None

    def channel(self, name: str) -> Channel:
        link = Link(name, uuid.uuid4().hex)
        self.closers.append(link.close)
        return link.channel(self.endpoint, "weight hub")

    def publisher(self, manifest: Manifest = LAYOUT, name: str = "trainer") -> Publisher:
        publisher = Publisher(self.channel(name), manifest)
        self.closers.append(publisher.close)
        publisher.register(WAIT_S)
        return publisher

    def receiver(self, name: str) -> Receiver:
        receiver = Receiver(self.channel(name), check_s=0.05, retry_s=0.02)
        self.closers.append(receiver.close)
        receiver.subscribe(WAIT_S)
        return receiver

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


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    assert remove_leftovers(name) == []


@pytest.fixture
def bench(
    zmq_context: zmq.Context[zmq.Socket[bytes]], run_id: str, tmp_path: Path
) -> Iterator[Bench]:
    bench = Bench(zmq_context, run_id, tmp_path)
    yield bench
    bench.close()


def content(version: int, size: int = LAYOUT.total_bytes) -> bytes:
    return random.Random(version).randbytes(size)


def publish(publisher: Publisher, version: int) -> None:
    publisher.slot(version, WAIT_S)[:] = content(version, publisher.manifest.total_bytes)
    publisher.publish(version, 0.25)


def take(receiver: Receiver) -> StagedVersion:
    staged = receiver.wait_first(WAIT_S, threading.Event())
    assert staged is not None
    return staged


def load(receiver: Receiver, version: int) -> None:
    """Load versions as they come until `version`; each is whole."""
    while True:
        staged = take(receiver)
        assert bytes(staged.data) == content(staged.version, staged.manifest.total_bytes)
        receiver.committed(staged, 0.125)
        if staged.version == version:
            return


def test_every_receiver_gets_every_byte(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    receivers = [bench.receiver(name) for name in ("gen-0", "gen-1")]
    for version in range(4):
        publish(publisher, version)
        for receiver in receivers:
            load(receiver, version)
    status = bench.channel("probe").call(HubStatusRequest(), HubStatus, timeout_s=WAIT_S)
    assert status.version == 3
    assert set(status.receivers) == {"gen-0", "gen-1"}
    assert not status.subscribed
    bench.stop()
    rows = bench.rows()
    assert {(row["version"], row["receiver"]) for row in rows} == {
        (version, name) for version in range(4) for name in ("gen-0", "gen-1")
    }
    assert all(row["bytes"] == LAYOUT.total_bytes and row["snapshot_s"] == 0.25 for row in rows)
    assert all(row["commit_s"] == 0.125 and row["plane"] == "shm" for row in rows)


def test_receivers_may_subscribe_before_there_is_a_trainer(bench: Bench) -> None:
    bench.start()
    receivers: list[Receiver] = []
    thread = threading.Thread(target=lambda: receivers.append(bench.receiver("gen-0")))
    thread.start()
    publisher = bench.publisher()
    thread.join(WAIT_S)
    publish(publisher, 0)
    load(receivers[0], 0)


def test_a_late_joiner_gets_the_newest_version(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    for version in range(3):
        publish(publisher, version)
    receiver = bench.receiver("gen-0")
    staged = take(receiver)
    assert staged.version == 2
    assert bytes(staged.data) == content(2)


def test_memory_that_is_being_loaded_is_left_alone(bench: Bench) -> None:
    bench.start(deadline_s=0.2)  # the hub drops who takes long to load, and pushes the next
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    loading = take(receiver)
    for version in range(1, 6):
        publish(publisher, version)
        assert receiver.poll() is None
        assert bytes(loading.data) == content(0)
    receiver.committed(loading, 0.0)
    load(receiver, 5)


def test_corrupted_bytes_are_never_loaded(bench: Bench, run_id: str) -> None:
    bench.start()
    publisher = bench.publisher()
    publish(publisher, 0)
    (path,) = SHM.glob(f"umbra-{run_id}-*")
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff\xff")
    receiver = bench.receiver("gen-0")
    with pytest.raises(DeadlineError, match="no weights from the weight hub"):
        receiver.wait_first(0.3, threading.Event())
    publish(publisher, 1)
    load(receiver, 1)
    assert bench.hub.protocol.counters["failed"] >= 2


def test_a_killed_receiver_does_not_stop_the_others(bench: Bench) -> None:
    bench.start(deadline_s=0.5)
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    command = [sys.executable, str(PROGRAMS / "stuck_receiver.py"), bench.endpoint, "gen-stuck"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "subscribed\n"
        publish(publisher, 0)
        assert stuck.stdout.readline() == "staging\n"
        stuck.kill()
    for version in range(1, 4):
        publish(publisher, version)
        load(receiver, version)
    assert list(bench.hub.protocol.serving) == ["gen-0"]


def test_a_dropped_receiver_comes_back(bench: Bench) -> None:
    bench.start(deadline_s=0.2)
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    staged = take(receiver)
    dropped = threading.Event()
    while not bench.hub.protocol.counters["dropped"]:
        dropped.wait(0.01)
    receiver.committed(staged, 1.0)
    publish(publisher, 1)
    load(receiver, 1)


def test_one_that_was_lost_without_a_word_comes_back(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    load(receiver, 0)
    bench.start()
    publish(publisher, 1)
    load(receiver, 1)


def test_another_layout_reaches_those_who_had_the_old(bench: Bench, run_id: str) -> None:
    bench.start()
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    loading = take(receiver)
    publisher.close()
    publish(bench.publisher(OTHER_LAYOUT, "trainer-2"), 7)
    receiver.committed(loading, 0.0)
    assert bytes(loading.data) == content(0)
    staged = take(receiver)
    assert staged.manifest == OTHER_LAYOUT
    assert staged.version == 7
    assert bytes(staged.data) == content(7, OTHER_LAYOUT.total_bytes)
    assert len(list(SHM.glob(f"umbra-{run_id}-*"))) == 1
    with pytest.raises(RejectedError) as caught:
        publisher._channel.call(Prepare(epoch=1, version=1, slot=0, checksums=[]), Ok, timeout_s=5)
    assert caught.value.code == "wrong_socket"


def test_a_slot_is_waited_for_until_the_deadline(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    command = [sys.executable, str(PROGRAMS / "stuck_receiver.py"), bench.endpoint, "gen-stuck"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "subscribed\n"
        publish(publisher, 0)
        assert stuck.stdout.readline() == "staging\n"
        publish(publisher, 1)
        with pytest.raises(DeadlineError, match="no free slot for version 2"):
            publisher.slot(2, 0.2)
        stuck.kill()


def test_a_manifest_with_another_digest_is_refused(bench: Bench) -> None:
    bench.start()
    wrong = Manifest(
        tensors=LAYOUT.tensors,
        buckets=LAYOUT.buckets,
        total_bytes=LAYOUT.total_bytes,
        digest="0" * 32,
    )
    with pytest.raises(RejectedError, match="digest"):
        bench.channel("trainer").call(
            RegisterManifest(manifest=wrong), ArenaReady, timeout_s=WAIT_S
        )


def test_too_little_shared_memory_is_the_trainers_error(bench: Bench) -> None:
    bench.start()
    huge = build_manifest([("w", "F32", [1 << 44])], 1 << 44)
    with pytest.raises(RejectedError, match="bytes free") as caught:
        bench.publisher(huge)
    assert caught.value.code == "no_room"


def test_a_receiver_elsewhere_is_told_why_there_is_no_way(bench: Bench) -> None:
    bench.start()
    receiver = Receiver(bench.channel("gen-0"), host="elsewhere")
    with pytest.raises(RejectedError, match=r"shm: the hub's /dev/shm is not the receiver's"):
        receiver.subscribe(WAIT_S)


def test_planes_are_chosen_and_refused_with_reasons() -> None:
    assert choose_plane("auto", "h", "h", ["tcp", "shm"]) == "shm"
    assert choose_plane("auto", "h", "other", ["shm", "tcp"]) == "tcp"
    with pytest.raises(RejectedError, match="shm: the hub's /dev/shm is not the receiver's"):
        choose_plane("auto", "h", "other", ["shm"])
    with pytest.raises(RejectedError, match="plane shm is set"):
        choose_plane("shm", "h", "h", ["tcp"])
    check_plane("auto")
    check_plane("shm")
    check_plane("tcp")
    for name in set(PLANES) - {"shm", "tcp"}:
        with pytest.raises(UsageError, match=f'weight_hub.plane = "{name}" cannot be used'):
            check_plane(name)


def test_a_closed_hub_is_named(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    publish(publisher, 0)
    bench.stop()
    receiver = Receiver(bench.channel("gen-0"))
    with pytest.raises(DeadlineError, match="no answer from weight hub at tcp://"):
        receiver.subscribe(0.2)


@pytest.fixture
def broker(
    zmq_context: zmq.Context[zmq.Socket[bytes]], run_id: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """A broker that lets everyone join; its address, and the endpoints that were announced."""
    server = Server(zmq_context, "broker", "b1")
    endpoint = server.bind("control", "tcp://127.0.0.1:*", CONTROL)
    data = server.bind("data", "tcp://127.0.0.1:*", DATA)
    events_in, events_out = server.relay_events("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    announced: dict[str, str] = {}
    stop = threading.Event()

    def main() -> None:
        while not stop.is_set():
            for request in server.poll(0.02):
                match request.body:
                    case Join(endpoints=endpoints):
                        announced.update(endpoints)
                        welcome = Welcome(
                            run_id=run_id,
                            heartbeat_s=0.1,
                            data=data,
                            events_in=events_in,
                            events_out=events_out,
                        )
                        server.reply(request, welcome)
                    case Heartbeat():
                        server.reply(request, HeartbeatAck(version=0))
                    case Leave():
                        server.reply(request, Ok())
                    case _:
                        pass

    thread = threading.Thread(target=main)
    thread.start()
    yield endpoint, announced
    stop.set()
    thread.join(WAIT_S)
    server.close()


@pytest.mark.e2e
def test_the_command_serves_and_leaves_nothing_behind(
    broker: tuple[str, dict[str, str]], bench: Bench, run_id: str
) -> None:
    address, announced = broker
    read, write = os.pipe()
    command = [sys.executable, "-m", "umbra", "weight-hub", "--broker", address]
    with subprocess.Popen(
        command,
        pass_fds=[write],
        env={**os.environ, "UMBRA_READY_FD": str(write)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write)
        with os.fdopen(read) as ready:
            facts = json.loads(ready.readline())
        assert facts == announced
        bench.endpoint = facts["weights"]
        assert bench.channel("probe").call(Ping(), Pong, timeout_s=WAIT_S).role == "weight_hub"
        publisher = bench.publisher()
        receiver = bench.receiver("gen-0")
        publish(publisher, 0)
        load(receiver, 0)
        assert list(SHM.glob(f"umbra-{run_id}-*"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, -signal.SIGTERM), errors
    assert not list(SHM.glob(f"umbra-{run_id}-*"))


def test_the_command_refuses_a_plane_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "umbra", "weight-hub", "--plane", "nccl"]
    done = subprocess.run(
        [*command, "--broker", "tcp://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "weight_hub.plane" in done.stderr
    assert "Traceback" not in done.stderr
