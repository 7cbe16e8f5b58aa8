"""Receivers and hubs die, hang, join and are lied to in every phase of a push, over every plane.

After each fault the generators that are left decode on, and every version that an engine claims to
serve is the trainer's, byte for byte (`Generating` compares after each load).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from fakes.fixtures import Closes
from fakes.hub_bench import PROGRAMS, WAIT_S, Bench, SmallFrames
from fakes.slowness import seconds

from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import Security
from umbra.proto.records import BucketsAt, Manifest, Sampling
from umbra.services.generator.engines.engine import EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.arena import SHM
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.plane import Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver, StagedVersion
from umbra.services.weights.verify import Checksums

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
BUCKET_BYTES = 1 << 10
TOKENS = 8


def checksum_of(model: Any, manifest: Manifest) -> int:
    state = model.state_dict()
    digest = xxhash.xxh3_64()
    for entry in manifest.tensors:
        digest.update(state[entry.name].to(DTYPE).contiguous().view(torch.uint8).numpy())
    return digest.intdigest()


class Policy:
    """A float32 model whose versions differ by some of their weights; it is served as bfloat16."""

    def __init__(self, model_dir: Path) -> None:
        torch.manual_seed(0)
        self._model = load_model(model_dir, CPU, torch.float32)
        self.manifest = build_manifest(tensor_layout(self._model, "bfloat16"), BUCKET_BYTES)
        self.checksums: list[int] = []
        self.sums: list[int] = []  # of the buckets written last

    @torch.no_grad()
    def write(self, publisher: Publisher) -> int:
        """Learn something, write the next version into its slot; the version."""
        version = len(self.checksums)
        for parameter in self._model.parameters():
            parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.02))
        self.checksums.append(checksum_of(self._model, self.manifest))
        slot = publisher.slot(version, WAIT_S)
        sums = Checksums(self.manifest, slot)
        write_shards(self._model, self.manifest, slot, sums=sums)
        self.sums = sums.result()
        return version

    def publish(self, publisher: Publisher) -> int:
        """As `write`; publish."""
        version = self.write(publisher)
        publisher.publish(version, 0.0, self.sums)
        return version


class Generating:
    """An engine that always decodes, and takes every version that its receiver has.

    After each load the bytes of the engine's own weights are compared with the trainer's.

    Args:
        receiver: subscribed.
        loading: called before each load.
    """

    def __init__(
        self,
        policy: Policy,
        model_dir: Path,
        receiver: Receiver,
        loading: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = load_model(model_dir, CPU, DTYPE)
        self.engine = TorchEngine(self.model, stop_ids=set(), slots=2, max_context=64, seed=0)
        self.failure: Exception | None = None
        self._policy = policy
        self._receiver = receiver
        self._loading = loading
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="generating")
        self._thread.start()

    def until(self, version: int) -> None:
        """Wait until it serves `version`, and decodes with it."""
        self.wait(lambda: self.engine.version >= version, f"version {version}")
        self.goes_on()

    def goes_on(self) -> None:
        goal = self.engine.decoded_tokens + 3 * TOKENS
        self.wait(lambda: self.engine.decoded_tokens >= goal, "tokens")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the generator hangs"

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds."""
        with self._changed:
            met = self._changed.wait_for(lambda: condition() or self.failure is not None, WAIT_S)
        if self.failure is not None:
            raise self.failure
        assert met, f"no {what} within {WAIT_S:g} s; version {self.engine.version} is served"

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread
            self.failure = error
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        staged = self._receiver.poll()
        if staged is not None:
            self._load(staged)
        if self.engine.version < 0:
            with self._receiver._changed:
                self._receiver._changed.wait(0.01)
            return
        if not self.engine.busy:
            self.engine.submit([EngineRequest("r", [5, 6, 7], Sampling(), TOKENS)])
        self.engine.poll(0.0)

    def _load(self, staged: StagedVersion) -> None:
        self._loading()

        def apply(staged: StagedVersion) -> None:
            self.engine.load(staged.manifest, staged.data, staged.version, "keep", staged.guard)

        self._receiver.load(staged, apply, WAIT_S, threading.Event())
        if self.engine.version >= 0:
            held = checksum_of(self.model, self._policy.manifest)
            assert held == self._policy.checksums[self.engine.version], "not the trainer's weights"


PLANES = pytest.mark.parametrize("plane", ["shm", "tcp"])


class Program:
    """One of `tests/programs`, which says how far it is."""

    def __init__(self, name: str, *words: str) -> None:
        command = [sys.executable, str(PROGRAMS / name), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def expect(self, word: str) -> None:
        """Read on until it says so: it has a version twice if it was too slow once."""
        while (said := self.line()).partition(" ")[0] != word:
            assert said, f"it ended before {word}"

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


class World:
    def __init__(self, bench: Bench, model_dir: Path, plane: str, **config: object) -> None:
        bench.start(plane=plane, delta="always", **config)
        self.bench = bench
        self.plane = plane
        self.policy = Policy(model_dir)
        self.publisher = bench.publisher(self.policy.manifest)
        self._model_dir = model_dir
        self._closers: list[Callable[[], None]] = []

    def publish(self) -> int:
        return self.policy.publish(self.publisher)

    def generator(self, name: str, watched: Watched | Detour | None = None) -> Generating:
        receiver = self.bench.receiver(name, watched or StagedPlanes([self.plane]))
        made = Generating(self.policy, self._model_dir, receiver)
        self._closers.append(made.close)
        return made

    def victim(self, phase: str) -> Program:
        """A receiver as a process, which halts in a phase of version 1."""
        how = (self.bench.endpoint, "gen-dies", self.plane, "1", phase)
        made = Program("halting_receiver.py", *how)
        self._closers.append(made.kill)
        made.expect("subscribed")
        return made

    def close(self) -> None:
        for close in reversed(self._closers):
            close()


class Watched(StagedPlanes):
    """Planes whose ends say when they begin, and go on when they are told."""

    def __init__(self, plane: str) -> None:
        super().__init__([plane], config=SmallFrames())
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        return _WatchedEnd(super().open(reply, security), self._arrived)

    def _arrived(self) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)


class _WatchedEnd:
    def __init__(self, real: ReceiverEnd, arrived: Callable[[], None]) -> None:
        self.close = real.close
        self._real = real
        self._arrived = arrived

    def receive(self, message: Prepare) -> Receiving:
        self._arrived()
        steps = self._real.receive(message)
        while True:
            try:
                bucket = next(steps)
            except StopIteration as end:
                return end.value
            if bucket is not None:
                self._arrived()
            yield bucket


class Detour(StagedPlanes):
    """A `TcpReceiver` whose buckets come through a proxy which spoils one byte."""

    def __init__(self, mode: str, at: int) -> None:
        super().__init__(["tcp"], config=SmallFrames())
        self._mode, self._at = mode, at
        self.taken: list[Receipt] = []
        self._proxy: Program | None = None
        self._port = ""

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        real = super().open(reply, security)
        assert isinstance(real, TcpReceiver)
        self._real = real
        return self

    def receive(self, message: Prepare) -> Receiving:
        (at,) = message.sources
        port = self._through(at.endpoint.removeprefix("tcp://"))
        at = BucketsAt(endpoint=f"tcp://127.0.0.1:{port}", key=at.key)
        message = msgspec.structs.replace(message, sources=[at])
        self.taken.append((yield from self._real.receive(message)))
        return self.taken[-1]

    def _through(self, target: str) -> str:
        """The port of the proxy to `target`."""
        if self._proxy is None:
            self._proxy = Program("spoiling_proxy.py", target, self._mode, str(self._at))
            self._port = self._proxy.line()
        return self._port

    def close(self) -> None:
        self._real.close()
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.kill()


@pytest.fixture
def world(bench: Bench, tiny_model: Path, closes: Closes) -> Callable[..., World]:
    return lambda plane, **config: closes(World(bench, tiny_model, plane, **config))


@pytest.mark.parametrize(
    ("phase", "plane"),
    [
        ("idle", "tcp"),
        ("prepared", "shm"),
        ("staging", "tcp"),
        ("staged", "shm"),
        ("loaded", "tcp"),
    ],
)
def test_a_receiver_that_is_killed_costs_the_others_nothing(
    world: Callable[..., World], plane: str, phase: str
) -> None:
    """1. Two receivers have version 0. 2. One halts in a phase of version 1 and is killed.
    3. Three more versions are published. 4. A new process joins under the name of the dead one.

    Result: the other has every version, the newcomer the newest; nobody waited for the dead.
    """
    one = world(plane, deadline_s=seconds(1.0))
    generator = one.generator("gen-0")
    victim = one.victim(phase)
    generator.until(one.publish())
    victim.expect("0")
    if phase != "idle":
        one.publish()
    victim.expect(phase)
    victim.kill()
    for _ in range(3):
        generator.until(one.publish())
    one.generator("gen-dies").until(len(one.policy.checksums) - 1)


@PLANES
def test_one_that_is_slow_holds_up_nobody_and_comes_back_by_itself(
    world: Callable[..., World], plane: str
) -> None:
    """A generator decodes on while its staging hangs; dropped, it subscribes again and is whole."""
    one = world(plane, deadline_s=seconds(1.0))
    watched = Watched(plane)
    slow, other = one.generator("gen-0", watched), one.generator("gen-1")
    version = one.publish()
    slow.until(version)
    other.until(version)
    counters = one.bench.hub.protocol.counters
    # Where the deadline is longer than the trainer's patience with a slot, that ends first. On a
    # machine that stood still it may have been slow before.
    drops = lambda: counters["deadline"] + counters["held_up"]  # noqa: E731
    before, served = drops(), slow.engine.version
    watched.begun.clear()
    watched.go.clear()
    one.publish()
    assert watched.begun.wait(WAIT_S)
    for _ in range(3):
        other.until(one.publish())
    slow.wait(lambda: drops() > before, "deadline")
    slow.goes_on()
    assert slow.engine.version == served == 0
    watched.go.set()
    slow.until(one.publish())


@pytest.mark.parametrize("mode", ["flip", "cut"])
def test_what_is_spoiled_on_the_wire_is_fetched_again(
    world: Callable[..., World], mode: str
) -> None:
    one = world("tcp")
    size = one.policy.manifest.total_bytes
    detour = Detour(mode, size // 2)
    generator = one.generator("gen-0", detour)
    for _ in range(3):
        generator.until(one.publish())
    first, *others = detour.taken
    assert ("checksum of bucket" in first.error) == (mode == "flip"), first.error
    assert [done.error for done in others] == [""] * (3 if first.error else 2)
    extra = first.wire_bytes + (others[0].wire_bytes if first.error else 0) - size
    assert 0 <= extra < size * 3 / 4  # only what was missing came again


@pytest.mark.parametrize(
    ("phase", "plane"),
    [("written", "tcp"), ("staging", "shm"), ("committing", "tcp"), ("idle", "shm")],
)
def test_a_new_hub_goes_on_for_one_that_is_killed(
    run_id: str, tiny_model: Path, plane: str, phase: str
) -> None:
    """1. The hub is killed in a phase of version 1. 2. A new one starts at its address.

    Result: version 1 is served, whole, and so is what follows; meanwhile generation goes on with
    version 0, whole.
    """
    hub = Program("lone_hub.py", "tcp://127.0.0.1:*", run_id, plane)
    endpoint = hub.line()
    link, other = IoThread("trainer", uuid.uuid4().hex), IoThread("gen-0", uuid.uuid4().hex)
    up, down = link.channel(endpoint, "hub"), other.channel(endpoint, "hub")
    policy = Policy(tiny_model)
    publisher = Publisher(up, policy.manifest)
    watched = Watched(plane)
    loading, load = threading.Event(), threading.Event()
    load.set()

    def halt() -> None:
        loading.set()
        assert load.wait(WAIT_S)

    receiver = Receiver(down, watched, check_s=0.05, retry_s=0.02)
    generator: Generating | None = None
    try:
        publisher.register(WAIT_S)
        receiver.subscribe(WAIT_S)
        generator = Generating(policy, tiny_model, receiver, loading=halt)
        generator.until(policy.publish(publisher))
        watched.begun.clear()
        loading.clear()
        if phase == "staging":
            watched.go.clear()
        if phase == "committing":
            load.clear()
        if phase == "written":
            policy.write(publisher)
        elif phase != "idle":
            policy.publish(publisher)
            assert (loading if phase == "committing" else watched.begun).wait(WAIT_S)
        hub.kill()
        if phase != "committing":
            generator.goes_on()
            assert generator.engine.version == 0
        hub = Program("lone_hub.py", endpoint, run_id, plane)
        endpoint = hub.line()
        up.move(endpoint)
        down.move(endpoint)
        watched.go.set()
        load.set()
        if phase == "written":
            publisher.publish(1, 0.0, policy.sums)
        elif phase == "idle":
            policy.publish(publisher)
        generator.until(1)
        generator.until(policy.publish(publisher))
    finally:
        watched.go.set()
        load.set()
        if generator is not None:
            generator.close()
        receiver.close()
        publisher.close()
        link.close()
        other.close()
        hub.process.terminate()
        hub.process.communicate(timeout=WAIT_S)
    assert not list(SHM.glob(f"umbra-{run_id}-*"))
