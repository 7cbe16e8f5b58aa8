"""Evaluations within a run: samples of held-out prompts, all of one policy version.

They have a pool and a ledger of their own, and go before training samples. An evaluation is due
every `eval.every` versions, and with `eval.at_ends` when a generator first asks for work and when
the last step is done. It is pinned to the version of the first generator that asks for work and
serves at least that: in mode "pause" the due one, as no training samples are leased until it is
done; in mode "concurrent" perhaps a later one.

In mode "concurrent" a generator defers newer weights while it has pinned samples, or more of them
wait for it, at most for `eval.timeout_s`; the trainer never waits. If every generator serves newer
weights nevertheless (the one with the samples has died, say), the evaluation restarts, pinned to
another version. So it ends with all its samples or as overdue, never with a part because training
was faster.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from umbra.proto.messages import Stuck
from umbra.proto.records import EvalReport
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.health import SampleFailure
from umbra.services.buffer.members import Membership
from umbra.services.buffer.samples.batches import Batches
from umbra.services.buffer.samples.groups import Grant, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.config import EvalConfig
from umbra.services.prompts import Prompt
from umbra.services.reporting import eval_scores

EVAL_PREFIX = "e"  # of the ids of eval samples
REPORTS_KEPT = 100
REPORTS_TOLD = 4  # to the trainer
MEASURED = ("version", "accuracy", "samples", "answered", "ended")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenEvaluation:
    due: int  # version from which on it may be pinned
    size: int
    ended_before: dict[str, int]  # of the pool's ledger when it began
    pinned: int = -1  # version of all its tokens; -1 = not known yet
    failed: dict[str, int] = field(default_factory=dict[str, int])  # samples, by prompt

    @property
    def version(self) -> int:
        return max(self.due, self.pinned)


@dataclass(eq=False)
class Evaluations:
    """The evaluations of a run: their beginning, leases of their samples, and their scores."""

    pool: SamplePool
    config: EvalConfig
    steps: int  # of the run
    prompts: Sequence[Prompt]
    batches: Batches
    members: Membership
    outbox: Effects
    reports: list[EvalReport] = field(default_factory=list[EvalReport])
    done: int = -1  # newest version whose evaluation is over
    open: OpenEvaluation | None = None  # the one under way
    _begun_at: float = 0.0
    _over: bool = False  # run finished; a resumed run restarts any evaluation that is due
    _serving: dict[str, int] = field(default_factory=dict[str, int])  # version of each generator

    @property
    def pausing(self) -> bool:
        return self.open is not None and self.config.mode == "pause"

    @property
    def newest(self) -> list[EvalReport]:
        """Return the last reports, so that a client that asks at every step gets each of them."""
        return self.reports[-REPORTS_TOLD:]

    def status(self) -> list[EvalReport]:
        return [*self.reports, self._report(self.open)] if self.open else list(self.reports)

    def advance(self, now: float) -> None:
        """Begin the evaluation that is due, end the one that is over; called at every event."""
        version, size = self.batches.version, self.config.samples if self.prompts else 0
        if self.open is not None and (self.open.due > version or self.open.size != size):
            self._end_all("cancelled")  # the trainer, or the run with other keys, starts again
            self.open = None
        if self.open is None and not self._over and self._is_due(version):
            self._begin(version, now)
        if self.open is not None:
            self._cut(self.open, now)
            if all(group.is_ready for group in self.pool.groups.values()):
                self._finish(self.open, now)

    def take(self, grant: Grant) -> None:
        self._serving[grant.holder] = grant.version
        self.advance(grant.now)
        while self._is_for(grant.version) and grant.room > 0:
            sample = self.pool.next_queued()
            if sample is None:
                break
            if self.open is not None and self.open.pinned < 0:
                self.open.pinned = grant.version
                for group in self.pool.groups.values():
                    group.due = grant.version
                    self.pool.journal.touch(group)
            self.pool.lease(sample, grant)

    def waits_for(self, version: int) -> bool:
        """True if samples wait for a generator that serves `version`, which should keep it."""
        return self._is_for(version) and self.pool.next_queued() is not None

    def stuck(self, now: float, stall_s: float) -> list[Stuck]:
        age_s = now - self._begun_at
        if self.open is None or age_s <= stall_s:
            return []
        report = self._report(self.open)
        what = f"evaluation of version {report.version}: {_missing(report)} samples are missing"
        action = f"the rest ends as overdue in {max(self.config.timeout_s - age_s, 0):.0f} s"
        holders = {sample.holder for sample in self.pool.samples.values()} - {""}
        holder = ", ".join(sorted(holders)) or "nobody"
        return [Stuck(what=what, holder=holder, age_s=age_s, action=action)]

    def cancel(self) -> None:
        self._over = True
        if self.open is not None:
            report = self._report(self.open)
            self._end_all("cancelled")
            ended = {**report.ended, "cancelled": _missing(report)}
            self.reports.append(replace(report, ended=ended))
            self.open = None

    def restore(self, now: float) -> None:
        """Take over the stored samples, with a new timeout."""
        self._begun_at = now
        journal = self.pool.journal
        self.pool.restore(journal.load(journal.scored()), now)

    def _is_for(self, version: int) -> bool:
        one = self.open
        if one is None or one.pinned < 0:
            return one is not None and version >= one.due
        return version == one.pinned

    def _is_due(self, version: int) -> bool:
        if not self.prompts or version <= self.done:
            return False
        every, at_ends = self.config.every, self.config.at_ends
        if not version:
            return at_ends and bool(self._serving)
        return (at_ends and version == self.steps) or (every > 0 and version % every == 0)

    def failed(self, failure: SampleFailure) -> None:
        if self.open is not None:
            failed = self.open.failed
            failed[failure.prompt_id] = failed.get(failure.prompt_id, 0) + failure.samples

    def _begin(self, version: int, now: float) -> None:
        count, size = len(self.prompts), self.config.samples
        each = self.config.samples_per_prompt
        for number, begun in enumerate(range(0, size, each)):
            prompt, answers = self.prompts[number % count], min(each, size - begun)
            groups = 1 if self.pool.scores_together(prompt) else answers
            for _ in range(groups):
                self.pool.issue(prompt, version, answers // groups)
        self.open = OpenEvaluation(version, size, dict(self.pool.ledger.ended))
        self._begun_at = now
        self.pool.openings += 1
        log.info("evaluation of version %d begins: %d samples", version, size)

    def _cut(self, open_: OpenEvaluation, now: float) -> None:
        """End an evaluation that takes too long; restart one that nobody can finish."""
        if now - self._begun_at >= (limit_s := self.config.timeout_s):
            text = "the evaluation of version %d ends unfinished after eval.timeout_s = %g s"
            log.warning(text, open_.version, limit_s)
            self._end_all("overdue")
            return
        under_way = self.pool.ledger.in_flight["generating"]
        if open_.pinned < 0 or under_way or self.pool.next_queued() is None:
            return
        generators = [p.name for p in self.members.peers.values() if p.role == "generator"]
        serving = [self._serving.get(name, -1) for name in generators]
        if serving and min(serving) > open_.pinned:
            text = "the evaluation of version %d begins again: all generators serve newer weights"
            log.warning(text, open_.pinned)
            self.pool.counters["evaluations_begun_again"] += 1
            for group in self.pool.groups.values():
                group.due = -1  # so that a late answer of the version before fits none
                for sample in group.samples:
                    self.pool.again(sample)
            open_.pinned = -1
            self.pool.openings += 1

    def _end_all(self, reason: str) -> None:
        for group in list(self.pool.groups.values()):
            if not group.is_ready or reason == "cancelled":
                self.pool.end(group, reason)

    def _finish(self, open_: OpenEvaluation, now: float) -> None:
        report = replace(self._report(open_), done=True)
        for group in list(self.pool.groups.values()):
            self.pool.end(group, "evaluated")
        self.reports = [*self.reports, report][-REPORTS_KEPT:]
        self.done, self.open = open_.version, None
        self.pool.openings += 1
        told = {name: getattr(report, name) for name in MEASURED}
        self.outbox.measure("eval", **told, **report.scores, seconds=now - self._begun_at)

    def _report(self, open_: OpenEvaluation) -> EvalReport:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for group in self.pool.groups.values():
            own = [sample.reward for sample in group.samples if sample.state is State.READY]
            rewards[group.prompt.prompt_id] += own
        ready = [reward for own in rewards.values() for reward in own]
        for prompt_id, count in open_.failed.items():
            rewards[prompt_id] += [0.0] * count
        over = self.pool.ledger.ended - Counter(open_.ended_before)
        counted = len(ready) + over["failed"]
        return EvalReport(
            version=open_.version,
            done=False,
            samples=open_.size,
            answered=len(ready),
            ended=dict(over),
            accuracy=sum(ready) / max(counted, 1),
            scores=eval_scores(rewards, self.config.samples_per_prompt),
        )


def _missing(report: EvalReport) -> int:
    return report.samples - report.answered - sum(report.ended.values())
