"""A receiver or the hub dies in any phase of a push: everyone else gets every version, whole."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.hub_bench import WAIT_S, Bench, take
from integration.test_tcp_plane import LAYOUT, Weights

from umbra.proto.messages import Prepare, Subscribed
from umbra.services.runtime.arena import SHM
from umbra.services.runtime.intake import ArenaIntake, Intake, Intaken
from umbra.services.runtime.link import Link
from umbra.services.runtime.publisher import Publisher
from umbra.services.runtime.receiver import Receiver

pytestmark = pytest.mark.fault
PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 1.0


class Halting:
    """A receiver as a process, which halts in a phase of version 1."""

    def __init__(self, endpoint: str, plane: str, phase: str) -> None:
        program = PROGRAMS / "halting_receiver.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), endpoint, "gen-dies", plane, "1", phase],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.expect("subscribed")

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def halting(bench: Bench) -> Iterator[Callable[[str, str], Halting]]:
    made: list[Halting] = []

    def start(plane: str, phase: str) -> Halting:
        made.append(Halting(bench.endpoint, plane, phase))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def receiver_of(bench: Bench, name: str, plane: str) -> Receiver:
    receiver = Receiver(bench.channel(name), planes=[plane], check_s=0.05, retry_s=0.02)
    bench.closers.append(receiver.close)
    receiver.subscribe(WAIT_S)
    return receiver


@pytest.mark.parametrize("plane", ["shm", "tcp"])
@pytest.mark.parametrize("phase", ["idle", "prepared", "staging", "staged"])
def test_a_receiver_that_is_killed_costs_the_others_nothing(
    bench: Bench,
    halting: Callable[[str, str], Halting],
    plane: str,
    phase: str,
) -> None:
    """1. Two receivers have version 0. 2. One halts in a phase of version 1 and is killed.
    3. Three more versions are published. 4. A new process joins under the name of the dead one.

    Result: the other has every version, the newcomer the newest; nobody waited for the dead.
    """
    bench.start(plane=plane, delta="always", deadline_s=DEADLINE_S)
    publisher = bench.publisher(LAYOUT)
    weights = Weights(LAYOUT)
    receiver = receiver_of(bench, "gen-0", plane)
    victim = halting(plane, phase)
    weights.load(receiver, weights.publish(publisher, 0.0))
    victim.expect("0")
    if phase != "idle":
        weights.publish(publisher, 0.01)
    victim.expect(phase)
    victim.kill()
    for _ in range(3):
        weights.load(receiver, weights.publish(publisher, 0.01))
    newcomer = receiver_of(bench, "gen-dies", plane)
    weights.load(newcomer, len(weights.versions) - 1)


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_a_receiver_slower_than_its_deadline_holds_up_nobody(
    bench: Bench,
    halting: Callable[[str, str], Halting],
    plane: str,
) -> None:
    """It hangs while it loads: it is dropped, trainer and other receivers go on."""
    bench.start(plane=plane, delta="always", deadline_s=DEADLINE_S)
    publisher = bench.publisher(LAYOUT)
    weights = Weights(LAYOUT)
    receiver = receiver_of(bench, "gen-0", plane)
    victim = halting(plane, "staging")
    weights.load(receiver, weights.publish(publisher, 0.0))
    victim.expect("0")
    for _ in range(4):
        weights.load(receiver, weights.publish(publisher, 0.01))
    look = threading.Event()
    while bench.hub.protocol.serving != {"gen-0": 4}:
        look.wait(0.01)
    assert bench.hub.protocol.counters["deadline"] == 1


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_one_that_joins_during_a_push_disturbs_nobody(
    bench: Bench,
    halting: Callable[[str, str], Halting],
    plane: str,
) -> None:
    """It gets the version that others are being pushed, while one of them hangs in the middle."""
    bench.start(plane=plane)
    publisher = bench.publisher(LAYOUT)
    weights = Weights(LAYOUT)
    victim = halting(plane, "staging")
    weights.publish(publisher, 0.0)
    victim.expect("0")
    weights.publish(publisher, 0.01)
    victim.expect("staging")
    weights.load(receiver_of(bench, "gen-0", plane), 1)
    assert "gen-dies" in bench.hub.protocol.serving  # its push is still under way


class Watched:
    """An intake that says when it begins, and goes on when it is told."""

    def __init__(self, reply: Subscribed, buffers: list[memoryview]) -> None:
        self._real = ArenaIntake(reply.path, reply.manifest, buffers)
        self.begun, self.go = threading.Event(), threading.Event()

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> Intaken:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        return self._real.take(message, target, interrupted)

    def close(self) -> None:
        self._real.close()


class HubProcess:
    """A hub as a process at an address that stays."""

    def __init__(self, endpoint: str, run: str) -> None:
        program = PROGRAMS / "lone_hub.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), endpoint, run], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("phase", ["written", "staging", "committing", "idle"])
def test_a_hub_that_is_killed_is_taken_over_from(run_id: str, phase: str) -> None:
    """1. The hub is killed in a phase of version 1. 2. A new one starts at its address.

    Result: version 1 is served, whole, and so is what follows; meanwhile version 0 stayed whole.
    """
    hub = HubProcess("tcp://127.0.0.1:*", run_id)
    link, other = Link("trainer", uuid.uuid4().hex), Link("gen-0", uuid.uuid4().hex)
    up, down = link.channel(hub.endpoint, "hub"), other.channel(hub.endpoint, "hub")
    publisher = Publisher(up, LAYOUT)
    watched: list[Watched] = []
    buffers = [memoryview(bytearray(LAYOUT.total_bytes)) for _ in range(2)]

    def opened(reply: Subscribed) -> Intake:
        watched.append(Watched(reply, buffers))
        if len(watched) > 1 or phase != "staging":
            watched[-1].go.set()
        return watched[-1]

    receiver = Receiver(down, check_s=0.05, retry_s=0.02, open_intake=opened)
    weights = Weights(LAYOUT)
    try:
        publisher.register(WAIT_S)
        receiver.subscribe(WAIT_S)
        watched[0].go.set()
        weights.publish(publisher, 0.0)
        staged = take(receiver)
        assert bytes(buffers[staged.candidate.buffer]) == weights.versions[0]
        receiver.committed(staged, 0.0)
        if phase == "staging":
            watched[0].go.clear()
        watched[0].begun.clear()
        if phase == "written":
            weights.write(publisher, 0.01)
        elif phase != "idle":
            weights.publish(publisher, 0.01)
            assert watched[0].begun.wait(WAIT_S)
        loading = take(receiver) if phase == "committing" else None
        hub.kill()
        hub = HubProcess(hub.endpoint, run_id)
        up.move(hub.endpoint)
        down.move(hub.endpoint)
        watched[0].go.set()
        if loading is not None:
            assert bytes(buffers[loading.candidate.buffer]) == weights.versions[1]
            receiver.committed(loading, 0.0)
        if phase == "written":
            publisher.publish(1, 0.0)
        elif phase == "idle":
            weights.publish(publisher, 0.01)
        for version in (1, 2):
            while True:
                staged = take(receiver)
                whole = bytes(buffers[staged.candidate.buffer]) == weights.versions[staged.version]
                receiver.committed(staged, 0.0)
                assert whole
                if staged.version == version:
                    break
            if version == 1:
                weights.publish(publisher, 0.01)
    finally:
        receiver.close()
        publisher.close()
        link.close()
        other.close()
        hub.process.terminate()
        hub.process.communicate(timeout=WAIT_S)
    assert not list(SHM.glob(f"umbra-{run_id}-*"))
