"""Scoring stages: trajectories go through them in order, each served by any number of workers.

A lease is `(sample_id, attempt)`, and no lease of a sample has the number of an earlier one: a
score of a response that was made anew meanwhile is known as late, though the same scorer has the
new one. A worker that dies, hangs or runs into an error costs an attempt; after `max_attempts` the
sample fails. Where a stage scores whole groups, a group is leased, scored, lost and failed as one:
its scores come in one message, and are taken all or not at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from umbra.proto.records import Score, ScoringTask
from umbra.services.buffer.samples.groups import Sample, State
from umbra.services.buffer.samples.ledger import count_reason
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import Packed, size_fault
from umbra.services.config.trajectory_rules import MOST_VERSION, reward_fault, scored_fault

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """A lease of a sample or a whole group to a scorer. Times are of the broker's clock."""

    pool: SamplePool
    samples: list[Sample]
    stage: str
    attempt: int
    holder: str
    leased_at: float
    deadline: float
    what: str  # it is, for people


class Scoring:
    """Leases of trajectories to scorers, for all pools; earlier pools go first.

    Args:
        lease_s: seconds until a lease that is not renewed expires.
        max_attempts: attempts of a sample in one stage until it fails.
    """

    def __init__(
        self,
        pools: Sequence[SamplePool],
        *,
        lease_s: float,
        max_attempts: int,
        counters: Counter[str],
    ) -> None:
        self.leases: dict[str, Lease] = {}  # by sample
        self.serving: dict[str, str] = {}  # by scorer, the stage that it has asked for
        self._pools = pools
        self._lease_s = lease_s
        self._max_attempts = max_attempts
        self._counters = counters

    def waiting(self, stage: str) -> int:
        """Count the trajectories waiting in `stage`; some of them may be over."""
        return sum(len(pool.unscored.get(stage, ())) for pool in self._pools)

    def waiting_since(self, stage: str) -> float | None:
        """Return since when the oldest trajectory waits in `stage`; None if none does."""
        return min(
            (
                sample.unscored_since
                for pool in self._pools
                for sample in pool.unscored.get(stage, ())
                if _is_in(sample, pool, stage)
            ),
            default=None,
        )

    def take(self, holder: str, stage: str, capacity: int, now: float) -> list[ScoringTask]:
        """Lease up to `capacity` trajectories of `stage`; at least one group, if scored whole."""
        tasks: list[ScoringTask] = []
        for pool in self._pools:
            queue = pool.unscored.get(stage)
            while queue and len(tasks) < capacity:
                sample = queue.popleft()
                if not _is_in(sample, pool, stage) or self._is_leased(sample):
                    continue
                samples = pool.scored_with(sample)
                if tasks and len(tasks) + len(samples) > capacity:
                    queue.appendleft(sample)
                    return tasks
                if samples:
                    tasks += self._lease(pool, samples, holder, stage, now)
        return tasks

    def submit(
        self, stage: str, scores: Sequence[tuple[Score, Packed]], holder: str, now: float
    ) -> dict[str, str]:
        """Accept the scores of a message; return why some are refused."""
        refused: dict[str, str] = {}
        found: dict[str, dict[str, tuple[Score, Packed]]] = {}  # by sample, by a lease's first
        leases: dict[str, Lease] = {}
        for score, packed in scores:
            lease = self._find(score.sample_id, score.attempt, holder)
            first = lease.samples[0].sample_id if lease is not None else ""
            if lease is None or lease.stage != stage or score.sample_id in found.get(first, ()):
                refused[score.sample_id] = self._refuse_late(1)
                continue
            leases[first] = lease
            found.setdefault(first, {})[score.sample_id] = score, packed
        for first, lease in leases.items():
            if fault := self._take(lease, found[first], now):
                refused |= dict.fromkeys(found[first], fault)
        return refused

    def _refuse_late(self, scores: int) -> str:
        self._counters["late_scores"] += scores
        return "this lease is not the sender's any more"

    def _take(self, lease: Lease, found: dict[str, tuple[Score, Packed]], now: float) -> str:
        """Accept the scores of all samples of `lease`; return why they are refused, or ""."""
        if not self._is_current(lease):  # its group ended by another score of the message
            self._drop(lease)
            return self._refuse_late(len(found))
        for score, _ in found.values():
            if score.error:
                self._lose(lease, score.error, own=True)
                return ""
        fault = _faults(lease, found)
        if fault is not None:
            self._counters["malformed_scores"] += 1
            self._lose(lease, fault, own=True)
            return f"malformed: {fault}"
        self._drop(lease)
        for sample in lease.samples:
            score, packed = found[sample.sample_id]
            reward = score.reward if lease.stage == "reward" else 0.0
            lease.pool.scored(sample, packed, reward, now)
            self._counters[f"scored: {lease.stage}"] += 1
        return ""

    def renew(self, sample_id: str, attempt: int, holder: str, now: float) -> bool:
        """Extend a lease; False if `holder` has lost it."""
        lease = self._find(sample_id, attempt, holder)
        if lease is not None:
            lease.deadline = now + self._lease_s
        return lease is not None

    def expire(self, now: float) -> None:
        for lease in self.all_leases():
            if not self._is_current(lease):
                self._drop(lease)
            elif lease.deadline <= now:
                self._counters["expired_scoring_leases"] += 1
                why = f"{lease.holder} did not answer within {self._lease_s:g} s"
                self._lose(lease, why, own=False)

    def take_all_back(self, holder: str, *, lost: bool) -> int:
        """Requeue whatever `holder` has; only `lost` leases count as attempts."""
        held = [lease for lease in self.all_leases() if lease.holder == holder]
        for lease in held:
            if lost:
                self._lose(lease, f"{holder} is gone", own=False)
            else:
                self._requeue(lease)
        return sum(len(lease.samples) for lease in held)

    def all_leases(self) -> list[Lease]:
        return [one for name, one in self.leases.items() if one.samples[0].sample_id == name]

    def _lease(
        self, pool: SamplePool, samples: list[Sample], holder: str, stage: str, now: float
    ) -> list[ScoringTask]:
        attempt = pool.lease_scoring(samples)
        what = f"sample {samples[0].sample_id}"
        if len(samples) > 1:
            what = f"group {samples[0].group.group_id}, {len(samples)} samples"
        lease = Lease(pool, samples, stage, attempt, holder, now, now + self._lease_s, what)
        for sample in samples:
            self.leases[sample.sample_id] = lease
        return [
            ScoringTask(
                sample_id=sample.sample_id,
                attempt=attempt,
                row=sample.group.prompt.row,
                lease_s=self._lease_s,
                trajectory=pool.trajectory_store.packed(sample.sample_id),
            )
            for sample in samples
        ]

    def _drop(self, lease: Lease) -> None:
        for sample in lease.samples:
            if self.leases.get(sample.sample_id) is lease:
                del self.leases[sample.sample_id]

    def _is_leased(self, sample: Sample) -> bool:
        lease = self.leases.get(sample.sample_id)
        if lease is not None and not self._is_current(lease):
            self._drop(lease)  # a sample of it was generated anew meanwhile
            return False
        return lease is not None

    def _find(self, sample_id: str, attempt: int, holder: str) -> Lease | None:
        lease = self.leases.get(sample_id)
        if lease is None or (lease.attempt, lease.holder) != (attempt, holder):
            return None
        return lease if self._is_current(lease) else None

    def _is_current(self, lease: Lease) -> bool:
        return all(
            _is_in(sample, lease.pool, lease.stage) and sample.score_attempts == lease.attempt
            for sample in lease.samples
        )

    def _lose(self, lease: Lease, reason: str, *, own: bool) -> None:
        """Retry after a failed attempt, or give up. `own` as of `SamplePool.fail`."""
        if not self._is_current(lease):
            self._drop(lease)
            return
        for sample in lease.samples:
            sample.score_losses += 1
        self._counters["scoring_retries"] += 1
        if max(sample.score_losses for sample in lease.samples) < self._max_attempts:
            self._requeue(lease)
            return
        self._drop(lease)
        self._counters["scoring_failures"] += 1
        if count_reason(self._counters, f"{lease.stage}: {reason}"):
            log.warning("%s failed in stage %s: %s", lease.what, lease.stage, reason)
        lease.pool.fail(lease.samples[0], f"{lease.stage}: {reason}", own=own)

    def _requeue(self, lease: Lease) -> None:
        self._drop(lease)
        if self._is_current(lease):
            lease.pool.unscored[lease.stage].extendleft(reversed(lease.samples))


def _is_in(sample: Sample, pool: SamplePool, stage: str) -> bool:
    return sample.state is State.SCORING and pool.stage_of(sample) == stage


def _faults(lease: Lease, found: dict[str, tuple[Score, Packed]]) -> str | None:
    """Return what is wrong with the scores of a lease."""
    if len(found) < len(lease.samples):
        return f"{len(found)} scores for the {len(lease.samples)} samples of a group"
    faults = (_fault(sample, lease, *found[sample.sample_id]) for sample in lease.samples)
    return next((fault for fault in faults if fault is not None), None)


def _fault(sample: Sample, lease: Lease, score: Score, packed: Packed) -> str | None:
    if fault := size_fault(packed, len(score.logprobs or b"")):
        return fault
    if lease.stage == "reward":
        parts = score.reward_parts
        if parts and sample.reward_parts:  # else there are no other names than these
            parts = lease.pool.trajectory_store.get(sample.sample_id).reward_parts | parts
        return reward_fault(sample.reward + score.reward, parts)
    if not -1 <= score.version <= MOST_VERSION:
        return f"version is {score.version}"
    return scored_fault(score.logprobs, sample.tokens)
