"""Processes that die and start again, at times that depend on the seed alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

from umbra.deploy.simulator.tables import FailureTable, Kind
from umbra.deploy.simulator.timeline import Timeline

RESTART_S = 5.0  # of a process that was taken for dead: its supervisor starts it again


class Failures:
    """Plans when what dies.

    Args:
        timeline: of the simulation.
        failures: by kind; what is not named does not fail.
        seed: of the times.
    """

    def __init__(
        self, timeline: Timeline, failures: Mapping[Kind, FailureTable], seed: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._timeline = timeline
        self._failures = failures
        self._seed = seed

    def plan(self, kind: Kind, name: str, die: Callable[[float], bool]) -> None:
        """Let `name` die again and again.

        Args:
            kind: of process.
            name: of it.
            die: is given the seconds until it may start again; whether there was something to die.
        """
        failure = self._failures.get(kind)
        if failure is None:
            return
        source = random.Random(f"{self._seed} {name}")

        def wait() -> None:
            self._timeline.after(source.expovariate(1 / failure.mtbf_s), fall)

        def fall() -> None:
            self.counts[kind] += die(failure.recovery_s)
            wait()

        wait()
