"""What came of a simulated run: counted from a step on at which the pipeline is full."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from umbra.deploy.simulator.desk import SimulatedBroker
from umbra.deploy.simulator.failures import Failures
from umbra.deploy.simulator.generator import SimGenerator
from umbra.deploy.simulator.scorer import SimScorer
from umbra.deploy.simulator.timeline import Shares, Timeline
from umbra.deploy.simulator.trainer import SimStep, SimTrainer
from umbra.proto.records import Ledger
from umbra.services.buffer.policy.staleness import StalenessStats

# Counters of the broker that tell of work done twice, or for nothing.
TOLD = (
    "taken_back", "partials_continued", "partials_too_old", "stale_answers", "stale_restarts",
    "filtered_groups", "groups_cut", "stragglers_cut", "interrupted", "returned", "dead_members",
    "superseded", "expired_leases", "late_answers", "steps_repeated", "restarts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of a run. Rates and shares are those of the window, counts those of the whole run."""

    generators: int
    trainer_gpus: int
    steps: int
    seconds: float  # simulated, of the whole run
    window_s: float  # from the first step that counts to the last one
    samples_per_s: float  # trained
    tokens_per_s: float  # response tokens trained
    decoded_per_s: float  # tokens that the generators made
    step_s: float
    generator: dict[str, float]  # shares of the time, by what they do or wait for
    trainer: dict[str, float]
    scorer: dict[str, float]
    slots: float  # share of the generators' slots in use
    staleness: dict[str, float]
    staleness_counts: list[int]  # trained samples by staleness, from 0
    ledger: Ledger
    counters: dict[str, int]
    broker_busy: float  # share of its thread
    broker_per_s: float  # requests
    broker_wait_s: float  # of a request in line, mean
    lag_s: float  # from a publication until an engine serves it, mean
    commits: list[float]  # when each step was committed, for good
    failures: dict[str, int]
    lost_tokens: int
    events: int

    @property
    def dropped(self) -> int:
        """Samples that ended otherwise than by the end of the run."""
        return sum(count for why, count in self.ledger.ended.items() if why != "cancelled")


class Window:
    """Takes the figures of a run from the commit before the `counted` steps to that of the last.

    Args:
        timeline: of the simulation.
        desk: of the broker.
        trainer: trains.
        generators: all of them.
        scorers: all of them.
        failures: counted.
        slots: of one generator.
        counted: steps with a full pipeline: after the first of the run, and before generators
            have less to do because the run is near its end.
    """

    def __init__(
        self,
        timeline: Timeline,
        desk: SimulatedBroker,
        trainer: SimTrainer,
        generators: Sequence[SimGenerator],
        scorers: Sequence[SimScorer],
        failures: Failures,
        *,
        slots: int,
        counted: range,
    ) -> None:
        self._timeline = timeline
        self._desk = desk
        self._trainer = trainer
        self._generators = generators
        self._scorers = scorers
        self._failures = failures
        self._slots = slots
        self._counted = counted
        self._begun = False
        self._since = 0.0
        self._made = (0, 0.0)
        self._staleness = StalenessStats()
        self._steps: dict[int, SimStep] = {}
        self._commits: dict[int, float] = {}
        self._made_last = self._made
        self._staleness_last = self._staleness
        self._broker = (0.0, 0, 0.0)

    def stepped(self, step: SimStep) -> None:
        """A step was committed; one that is repeated counts once."""
        self._commits[step.step] = step.at
        if step.step in self._counted:
            self._steps[step.step] = step
            if step.step == self._counted[-1]:
                self._end()
        elif step.step == self._counted.start - 1 and not self._begun:
            self._begun = True
            self._since = step.at
            self._made = self._count()
            self._staleness.merge(self._desk.broker.batches.trained)
            self._desk.restart_counts()
            for shares in self._all_shares():
                shares.restart()

    def close(self, ledger: Ledger, gpus: int) -> Prediction:
        """The figures; the run has just ended with `ledger`, trained on `gpus`."""
        steps, broker = self._steps.values(), self._desk.broker
        seconds = self._steps[self._counted[-1]].at - self._since
        samples = sum(step.samples for step in steps)
        decoded, slot_seconds = (
            after - before for after, before in zip(self._made_last, self._made, strict=True)
        )
        staleness = self._staleness_last
        staleness.remove(self._staleness)
        published = self._trainer.published_at
        lags = [at - published[version] for one in self._generators for version, at in one.loads]
        return Prediction(
            generators=len(self._generators),
            trainer_gpus=gpus,
            steps=self._trainer.version,
            seconds=self._timeline.now,
            window_s=seconds,
            samples_per_s=samples / seconds,
            tokens_per_s=sum(step.tokens for step in steps) / seconds,
            decoded_per_s=decoded / seconds,
            step_s=seconds / len(self._steps),
            generator=_mean_shares(one.shares for one in self._generators),
            trainer=_mean_shares([self._trainer.shares]),
            scorer=_mean_shares(one.shares for one in self._scorers),
            slots=slot_seconds / (seconds * self._slots * len(self._generators)),
            staleness=staleness.figures(),
            staleness_counts=staleness.counts,
            ledger=ledger,
            counters={name: broker.counters[name] for name in TOLD if broker.counters[name]},
            broker_busy=self._broker[0] / seconds,
            broker_per_s=self._broker[1] / seconds,
            broker_wait_s=self._broker[2] / max(self._broker[1], 1),
            lag_s=mean(lags) if lags else 0.0,
            commits=[at for _, at in sorted(self._commits.items())],
            failures=dict(self._failures.counts),
            lost_tokens=sum(one.lost_tokens for one in self._generators),
            events=self._timeline.events,
        )

    def _end(self) -> None:
        """The last step that counts was committed; this is so again should it be repeated."""
        self._made_last = self._count()
        desk = self._desk
        self._staleness_last = copy.deepcopy(desk.broker.batches.trained)
        self._broker = (desk.busy_s, desk.requests, desk.waited_s)
        for shares in self._all_shares():
            shares.stop()

    def _count(self) -> tuple[int, float]:
        """Tokens decoded, and seconds of slots in use, by all generators since the beginning."""
        counts = [generator.count() for generator in self._generators]
        return sum(tokens for tokens, _ in counts), sum(seconds for _, seconds in counts)

    def _all_shares(self) -> list[Shares]:
        ours = (self._trainer, *self._generators, *self._scorers)
        return [one.shares for one in ours]


def _mean_shares(of: Iterable[Shares]) -> dict[str, float]:
    """Shares of the time of all, together; the largest first."""
    total: Counter[str] = Counter()
    for shares in of:
        total.update(shares.counted)
    seconds = sum(total.values())
    return {state: spent / seconds for state, spent in total.most_common() if spent}
