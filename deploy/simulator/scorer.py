"""A simulated scorer: leases trajectories of one stage, lets time pass, sends scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from umbra.deploy.simulator.answers import size_of, versions_of
from umbra.deploy.simulator.desk import Client, SimulatedBroker
from umbra.deploy.simulator.tables import ScoringSpeed
from umbra.deploy.simulator.timeline import Shares, Timeline
from umbra.proto.messages import (
    LeaseScoring,
    RenewAck,
    RenewLeases,
    ScoringLeases,
    SubmitAck,
    SubmitScores,
)
from umbra.proto.records import Score, ScoringTask

WAIT_S = 10.0  # how long a question for trajectories stays open


class SimScorer:
    """One process that serves one stage.

    Args:
        timeline: of the simulation.
        name: in the run.
        desk: of the broker.
        stage: that it serves.
        capacity: trajectories leased at once.
        speed: of it.
        expelled: called when the broker took it for dead.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        desk: SimulatedBroker,
        stage: str,
        capacity: int,
        speed: ScoringSpeed,
        expelled: Callable[[], object],
    ) -> None:
        self.shares = Shares(timeline)
        self.client = Client(desk, timeline, name, "scorer", lambda _body: None, expelled)
        self._timeline = timeline
        self._stage = stage
        self._capacity = capacity
        self._speed = speed

    def start(self) -> None:
        self.client.join(self._ask)

    def _ask(self) -> None:
        self.shares.to("work")
        body = LeaseScoring(stage=self._stage, capacity=self._capacity, wait_s=WAIT_S)
        self.client.ask(body, ScoringLeases, self._leased)

    def _leased(self, leases: ScoringLeases) -> None:
        if not leases.tasks:
            self._ask()
            return
        self.shares.to("scoring")
        seconds = self._seconds(leases.tasks)
        end = self._timeline.now + seconds
        self._timeline.at(end, lambda: self._submit(leases.tasks))
        self._renew(leases.tasks, end)

    def _renew(self, tasks: Sequence[ScoringTask], end: float) -> None:
        """Every third of the lease, as long as it scores."""
        period = tasks[0].lease_s / 3
        if self._timeline.now + period >= end:
            return

        def again() -> None:
            held = [(task.sample_id, task.attempt) for task in tasks]
            self.client.ask(RenewLeases(leases=held), RenewAck, lambda _reply: None)
            self._renew(tasks, end)

        self._timeline.after(period, again)

    def _seconds(self, tasks: Sequence[ScoringTask]) -> float:
        rate = self._speed.tokens_per_s
        tokens = sum(sum(size_of(task.trajectory)) for task in tasks)
        return self._speed.seconds + (tokens / rate if rate else 0.0)

    def _submit(self, tasks: Sequence[ScoringTask]) -> None:
        scores = [self._score(task) for task in tasks]
        body = SubmitScores(stage=self._stage, scores=scores)
        self.client.ask(body, SubmitAck, lambda _reply: self._ask())

    def _score(self, task: ScoringTask) -> Score:
        if self._stage == "reward":
            return Score(sample_id=task.sample_id, attempt=task.attempt)
        logprobs = bytes(4 * len(versions_of(task.trajectory)))
        return Score(sample_id=task.sample_id, attempt=task.attempt, logprobs=logprobs)
