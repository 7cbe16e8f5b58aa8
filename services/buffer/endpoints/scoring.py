"""Scoring stages: trajectories go through them in order, each served by any number of workers.

A lease is `(sample_id, attempt)`, `attempt` counting the leases of the sample in its stage. A
worker that dies, hangs or runs into an error costs an attempt; after `max_attempts` the sample
fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from umbra.proto.records import Score, ScoringTask
from umbra.services.buffer.samples.failure_counts import count_reason
from umbra.services.buffer.samples.groups import Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectory_store import Packed, size_fault
from umbra.services.runtime.trajectories import MOST_VERSION, reward_fault, scored_fault

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """A sample in the hands of a scorer. Times are seconds of the broker's clock."""

    pool: SamplePool
    sample: Sample
    stage: str
    attempt: int
    holder: str
    leased_at: float
    deadline: float


class Scoring:
    """Leases of trajectories to scorers, for all pools; earlier pools go first.

    Args:
        pools: where trajectories wait for their stages.
        lease_s: seconds until a lease that is not renewed expires.
        max_attempts: attempts of a sample in one stage until it fails.
        counters: of the broker.
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
        """Trajectories that nobody scores yet; some of them may be over."""
        return sum(len(pool.unscored.get(stage, ())) for pool in self._pools)

    def waiting_since(self, stage: str) -> float | None:
        """When the trajectory came to `stage` that has waited longest; None if none waits."""
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
        """Up to `capacity` trajectories of `stage` for `holder`."""
        tasks: list[ScoringTask] = []
        for pool in self._pools:
            queue = pool.unscored.get(stage)
            while queue and len(tasks) < capacity:
                sample = queue.popleft()
                if _is_in(sample, pool, stage) and sample.sample_id not in self.leases:
                    tasks.append(self._lease(pool, sample, holder, stage, now))
        return tasks

    def submit(
        self, stage: str, score: Score, packed: Packed, holder: str, now: float
    ) -> str | None:
        """Take in a score, which came `packed`; the reason if it is refused."""
        lease = self._find(score.sample_id, score.attempt, holder)
        if lease is None or lease.stage != stage:
            self._counters["late_scores"] += 1
            return "this lease is not the sender's any more"
        sample = lease.sample
        if score.error:
            self._lose(lease, score.error, own=True)
            return None
        fault = _fault(stage, score, packed, lease)
        if fault is not None:
            self._counters["malformed_scores"] += 1
            self._lose(lease, fault, own=True)
            return f"malformed: {fault}"
        del self.leases[sample.sample_id]
        reward = score.reward if stage == "reward" else 0.0
        lease.pool.scored(sample, packed, reward, now)
        self._counters[f"scored: {stage}"] += 1
        return None

    def renew(self, sample_id: str, attempt: int, holder: str, now: float) -> bool:
        """Put off the deadline of a lease; False if it is not `holder`'s any more."""
        lease = self._find(sample_id, attempt, holder)
        if lease is not None:
            lease.deadline = now + self._lease_s
        return lease is not None

    def expire(self, now: float) -> None:
        """Take back the leases whose deadline is over."""
        for lease in list(self.leases.values()):
            if not self._is_current(lease):
                del self.leases[lease.sample.sample_id]
            elif lease.deadline <= now:
                self._counters["expired_scoring_leases"] += 1
                why = f"{lease.holder} did not answer within {self._lease_s:g} s"
                self._lose(lease, why, own=False)

    def take_all_back(self, holder: str, *, lost: bool) -> int:
        """Take back whatever `holder` has; only `lost` leases count as attempts."""
        held = [lease for lease in self.leases.values() if lease.holder == holder]
        for lease in held:
            if lost:
                self._lose(lease, f"{holder} is gone", own=False)
            else:
                self._requeue(lease)
        return len(held)

    def _lease(
        self, pool: SamplePool, sample: Sample, holder: str, stage: str, now: float
    ) -> ScoringTask:
        sample.score_attempts += 1
        lease = Lease(pool, sample, stage, sample.score_attempts, holder, now, now + self._lease_s)
        self.leases[sample.sample_id] = lease
        return ScoringTask(
            sample_id=sample.sample_id,
            attempt=lease.attempt,
            row=sample.group.prompt.row,
            lease_s=self._lease_s,
            trajectory=pool.trajectory_store.packed(sample.sample_id),
        )

    def _find(self, sample_id: str, attempt: int, holder: str) -> Lease | None:
        lease = self.leases.get(sample_id)
        if lease is None or (lease.attempt, lease.holder) != (attempt, holder):
            return None
        return lease if self._is_current(lease) else None

    def _is_current(self, lease: Lease) -> bool:
        sample = lease.sample
        return _is_in(sample, lease.pool, lease.stage) and sample.score_attempts == lease.attempt

    def _lose(self, lease: Lease, reason: str, *, own: bool) -> None:
        """The attempt was for nothing: try again, or give up. `own` as of `SamplePool.fail`."""
        sample = lease.sample
        if not self._is_current(lease):
            del self.leases[sample.sample_id]
            return
        sample.score_losses += 1
        self._counters["scoring_retries"] += 1
        if sample.score_losses < self._max_attempts:
            self._requeue(lease)
            return
        del self.leases[sample.sample_id]
        self._counters["scoring_failures"] += 1
        if count_reason(self._counters, f"{lease.stage}: {reason}"):
            log.warning("%s failed in stage %s: %s", sample.sample_id, lease.stage, reason)
        lease.pool.fail(sample, f"{lease.stage}: {reason}", own=own)

    def _requeue(self, lease: Lease) -> None:
        del self.leases[lease.sample.sample_id]
        if self._is_current(lease):
            lease.pool.unscored[lease.stage].appendleft(lease.sample)


def _is_in(sample: Sample, pool: SamplePool, stage: str) -> bool:
    return sample.state is State.SCORING and pool.stage_of(sample) == stage


def _fault(stage: str, score: Score, packed: Packed, lease: Lease) -> str | None:
    if fault := size_fault(packed, len(score.logprobs or b"")):
        return fault
    sample = lease.sample
    if stage == "reward":
        parts = score.reward_parts
        if parts and sample.reward_parts:  # else there are no other names than these
            parts = lease.pool.trajectory_store.get(sample.sample_id).reward_parts | parts
        return reward_fault(sample.reward + score.reward, parts)
    if not -1 <= score.version <= MOST_VERSION:
        return f"version is {score.version}"
    return scored_fault(score.logprobs, sample.tokens)
