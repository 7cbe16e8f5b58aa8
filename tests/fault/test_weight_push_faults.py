"""Receivers and hubs die, hang and join in every phase of a push, over planes shm and tcp.

After each fault the engines that are left go on, and every version that an engine claims to serve
is the trainer's, byte for byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.hub_bench import PROGRAMS, WAIT_S, Bench, Engine, Watched, Weights, publish_slot
from fakes.slowness import seconds, until

from umbra.services.weights.planes.receiving import StagedPlanes


class Generating(Engine):
    """An engine in a thread: it takes every version that comes, and decodes on meanwhile."""

    def __init__(
        self, bench: Bench, weights: Weights, name: str, planes: StagedPlanes | list[str]
    ) -> None:
        super().__init__(bench.receiver(name, planes), weights.versions.__getitem__)
        bench.closers.append(self.close)
        self.turns = 0
        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(self._main)

    def until(self, version: int) -> None:
        """Wait until it serves `version`, and decodes with it."""
        self.wait(lambda: self.version >= version, f"version {version}")
        self.goes_on()

    def goes_on(self) -> None:
        goal = self.turns + 3
        self.wait(lambda: self.turns >= goal, "turns")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            if self._running.done():
                self._running.result()
            return condition()

        until(met, lambda: f"{what}; version {self.version} is served")

    def close(self) -> None:
        self.stopping.set()
        self._running.result(WAIT_S)
        self._thread.shutdown()

    def _main(self) -> None:
        while not self.stopping.is_set():
            if (staged := self.receiver.poll()) is not None:
                self.load(staged)
            self.turns += 1
            time.sleep(0.001)


class Program:
    """One of `tests/programs`, which says how far it is."""

    def __init__(self, bench: Bench, name: str, *words: str) -> None:
        command = [sys.executable, str(PROGRAMS / name), *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        bench.closers.append(self.close)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def expect(self, word: str) -> None:
        """Read on until it says so: it has a version twice if it was too slow once."""
        while (said := self.line()).partition(" ")[0] != word:
            assert said, f"it ended before {word}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)


class Gate:
    """Something passes here, and waits while it is shut."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self.open()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_S)

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def trainer(bench: Bench, plane: str) -> Weights:
    bench.start(plane=plane, delta="always", deadline_s=seconds(1.0))
    return Weights(bench.publisher())


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
    bench: Bench, plane: str, phase: str
) -> None:
    """1. Two receivers have version 0. 2. One halts in a phase of version 1 and is killed.
    3. Three more versions are published. 4. A new process joins under the name of the dead one.

    Result: the other has every version, the newcomer the newest; nobody waited for the dead.
    """
    weights = trainer(bench, plane)
    generator = Generating(bench, weights, "gen-0", [plane])
    how = (bench.endpoint, "gen-dies", plane, "1", phase)
    victim = Program(bench, "halting_receiver.py", *how)
    victim.expect("subscribed")
    generator.until(weights.publish())
    victim.expect("0")
    if phase != "idle":
        weights.publish()
    victim.expect(phase)
    victim.kill()
    for _ in range(3):
        generator.until(weights.publish())
    Generating(bench, weights, "gen-dies", [plane]).until(len(weights.versions) - 1)


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_one_that_is_slow_holds_up_nobody_and_comes_back_by_itself(
    bench: Bench, plane: str
) -> None:
    """A generator decodes on while its staging hangs; dropped, it subscribes again and is whole."""
    weights, gate = trainer(bench, plane), Gate()
    slow = Generating(bench, weights, "gen-0", Watched(plane, gate))
    other = Generating(bench, weights, "gen-1", [plane])
    version = weights.publish()
    slow.until(version)
    other.until(version)
    counters = bench.hub.protocol.counters
    # Where the deadline is longer than the trainer's patience with a slot, that ends first. On a
    # machine that stood still it may have been slow before.
    drops = lambda: counters["deadline"] + counters["held_up"]  # noqa: E731
    before = drops()
    gate.shut()
    weights.publish()
    assert gate.reached.wait(WAIT_S)
    for _ in range(3):
        other.until(weights.publish())
    slow.wait(lambda: drops() > before, "deadline")
    slow.goes_on()
    assert slow.version == 0
    gate.open()
    slow.until(weights.publish())


@pytest.mark.parametrize(
    ("phase", "plane"),
    [("written", "tcp"), ("staging", "shm"), ("committing", "tcp"), ("idle", "shm")],
)
def test_a_new_hub_goes_on_for_one_that_is_killed(
    bench: Bench, run_id: str, tmp_path: Path, plane: str, phase: str
) -> None:
    """1. The hub is killed in a phase of version 1. 2. A new one starts at its address.

    Result: version 1 is served, whole, and so is what follows; meanwhile generation goes on with
    version 0, whole, and no shared memory is left behind (`run_id` looks).
    """
    how = (run_id, plane, str(tmp_path))
    hub = Program(bench, "lone_hub.py", "tcp://127.0.0.1:*", *how)
    bench.endpoint = hub.line()
    weights, staging, loading = Weights(bench.publisher()), Gate(), Gate()
    generator = Generating(bench, weights, "gen-0", Watched(plane, staging))
    generator.under = loading
    generator.until(weights.publish())
    gate = loading if phase == "committing" else staging
    if phase == "written":
        weights.write()
    elif phase != "idle":
        gate.shut()
        weights.publish()
        assert gate.reached.wait(WAIT_S)
    hub.kill()
    if phase != "committing":
        generator.goes_on()
        assert generator.version == 0
    bench.move(Program(bench, "lone_hub.py", bench.endpoint, *how).line())
    gate.open()
    if phase == "written":
        publish_slot(weights.publisher, 1)
    elif phase == "idle":
        weights.publish()
    generator.until(1)
    generator.until(weights.publish())
