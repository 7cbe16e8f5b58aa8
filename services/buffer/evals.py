"""Evaluations within a run: samples of held-out prompts, all tokens of them of one policy version.

They have a pool and a ledger of their own, and go before training samples. In mode "pause" nothing
else is handed out until an evaluation is done, so the version stays; in mode "concurrent" training
goes on, and samples that no generator can make any more, because all serve newer weights, end as
`superseded`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from umbra.proto.messages import Stuck
from umbra.proto.records import EvalReport, SampleTask, Trajectory
from umbra.services.buffer.answers import Answers
from umbra.services.buffer.batches import Batches
from umbra.services.buffer.effects import Outbox
from umbra.services.buffer.groups import Sample, State
from umbra.services.buffer.membership import Membership
from umbra.services.buffer.prompts import Prompt
from umbra.services.buffer.samples import Pool
from umbra.services.runtime.config import Eval

REPORTS_KEPT = 100

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """The evaluation under way."""

    version: int
    begun_at: float
    samples: list[Sample]


class EvalAnswers(Answers):
    """Takes what generators send back of eval samples: all tokens must be of the pinned version."""

    def _unfit(self, sample: Sample, trajectory: Trajectory) -> str | None:
        due = sample.group.due
        if {span.version for span in trajectory.spans} == {due}:
            return None
        return f"an eval sample of version {due} has tokens of another version"

    def _give_up(self, sample: Sample) -> None:
        self._counters["mixed_eval_samples"] += 1
        self._pool.again(sample)


class Evals:
    """Begins evaluations, hands out their samples and reports what comes of them.

    Args:
        pool: of eval samples alone.
        config: `[eval]`.
        prompts: held-out ones; empty if there are no evaluations.
        members: tells which generators there are.
    """

    def __init__(
        self,
        pool: Pool,
        config: Eval,
        prompts: Sequence[Prompt],
        batches: Batches,
        members: Membership,
        outbox: Outbox,
    ) -> None:
        self.pool = pool
        self.reports: list[EvalReport] = []
        self.done = -1  # newest version whose evaluation is over
        self._config = config
        self._prompts = prompts
        self._batches = batches
        self._members = members
        self._outbox = outbox
        self._open: _Open | None = None
        self._serving: dict[str, int] = {}  # version that each generator serves

    @property
    def pausing(self) -> bool:
        """Whether training waits for an evaluation."""
        return self._open is not None and self._config.mode == "pause"

    @property
    def is_open(self) -> bool:
        """Whether an evaluation is under way."""
        return self._open is not None

    def status(self) -> list[EvalReport]:
        """All reports, that of the one under way included."""
        return [*self.reports, self._report(self._open)] if self._open else list(self.reports)

    def advance(self, now: float) -> None:
        """Begin what is due at the version reached, and end what is over; called at every event."""
        version, every = self._batches.version, self._config.every
        if self._open is not None and self._open.version > version:
            self._end_all("cancelled")  # the trainer starts again before that version
            self._open = None
            self.pool.openings += 1
        if self._open is None and every and version % every == 0 and 0 < version > self.done:
            self._begin(version, now)
        if self._open is not None:
            self._cut(self._open, now)
            if all(s.state in (State.READY, State.OVER) for s in self._open.samples):
                self._finish(self._open, now)

    def take(self, holder: str, version: int, capacity: int, now: float) -> list[SampleTask]:
        """Up to `capacity` samples for a generator that serves `version`."""
        self._serving[holder] = version
        tasks: list[SampleTask] = []
        while self._open and version == self._open.version and len(tasks) < capacity:
            sample = self.pool.next_queued()
            if sample is None:
                break
            task = self.pool.lease(sample, holder, version, now)
            tasks.append(replace(task, pinned_version=version))
        return tasks

    def stuck(self, now: float, stall_s: float) -> list[Stuck]:
        """The evaluation, if it takes long."""
        if self._open is None or now - self._open.begun_at <= stall_s:
            return []
        report = self._report(self._open)
        missing = report.samples - report.answered - sum(report.ended.values())
        what = f"evaluation of version {report.version}: {missing} samples are missing"
        holders = sorted(self.pool.held) or ["nobody"]
        left_s = self._config.timeout_s - (now - self._open.begun_at)
        return [
            Stuck(
                what=what,
                holder=", ".join(holders),
                age_s=now - self._open.begun_at,
                action=f"the rest ends as overdue in {max(left_s, 0):.0f} s",
            )
        ]

    def cancel(self) -> None:
        """The run is over before the evaluation is."""
        if self._open is not None:
            self._end_all("cancelled")
            self.reports.append(self._report(self._open))
            self._open = None

    def record(self) -> dict[str, Any]:
        """What a restarted buffer must know; an evaluation under way begins anew then."""
        return {
            "done": self.done,
            "next": [self.pool.next_group, self.pool.next_sample],
            "reports": msgspec.to_builtins(self.reports),
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Take over `record`."""
        self.done = record["done"]
        self.pool.next_group, self.pool.next_sample = record["next"]
        self.reports = msgspec.convert(record["reports"], list[EvalReport])

    # -- steps -------------------------------------------------------------------------------------

    def _begin(self, version: int, now: float) -> None:
        count = len(self._prompts)
        samples = [
            self.pool.issue(self._prompts[index % count], version).samples[0]
            for index in range(self._config.run_samples)
        ]
        self._open = _Open(version, now, samples)
        self.pool.openings += 1
        log.info("evaluation of version %d begins: %d samples", version, len(samples))

    def _cut(self, open_: _Open, now: float) -> None:
        """End what will not come any more."""
        if now - open_.begun_at >= self._config.timeout_s:
            log.warning(
                "the evaluation of version %d ends unfinished after eval.timeout_s = %g s",
                open_.version, self._config.timeout_s,
            )  # fmt: skip
            self._end_all("overdue")
            return
        names = [p.name for p in self._members.peers.values() if p.role == "generator"]
        serving = [self._serving.get(name, -1) for name in names]
        if serving and min(serving) > open_.version and not self.pool.held:
            self._end_all("superseded", State.QUEUED)

    def _end_all(self, reason: str, state: State | None = None) -> None:
        for group in list(self.pool.groups.values()):
            if group.samples[0].state is not State.READY and (
                state is None or group.samples[0].state is state
            ):
                self.pool.end(group, reason)

    def _finish(self, open_: _Open, now: float) -> None:
        report = replace(self._report(open_), done=True)
        for group in list(self.pool.groups.values()):
            self.pool.end(group, "evaluated")
        self.reports = [*self.reports, report][-REPORTS_KEPT:]
        self.done, self._open = open_.version, None
        self.pool.openings += 1
        log.info(
            "evaluation of version %d: accuracy %.4f over %d samples",
            report.version, report.accuracy, report.answered,
        )  # fmt: skip
        self._outbox.measure(
            "eval",
            version=report.version,
            accuracy=report.accuracy,
            samples=report.samples,
            answered=report.answered,
            ended=report.ended,
            seconds=now - open_.begun_at,
        )

    def _report(self, open_: _Open) -> EvalReport:
        ready = [sample for sample in open_.samples if sample.state is State.READY]
        over = Counter(
            self.pool.over[sample.sample_id].end
            for sample in open_.samples
            if sample.state is State.OVER
        )
        counted = len(ready) + over["failed"]
        return EvalReport(
            version=open_.version,
            done=False,
            samples=len(open_.samples),
            answered=len(ready),
            ended=dict(over),
            accuracy=sum(sample.reward for sample in ready) / max(counted, 1),
        )
