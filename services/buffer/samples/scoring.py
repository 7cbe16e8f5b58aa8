"""Scoring stages: trajectories go through them in order, each served by any number of workers.

A worker that dies, hangs or runs into an error costs an attempt; after `max_attempts` the sample
fails. Where a stage scores whole groups, a group is leased, scored, lost and failed as one: its
scores come in one message, and are taken all or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from umbra.proto.records import Score
from umbra.services.buffer.samples.groups import Grant, LeaseTable, Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import Packed, size_fault
from umbra.services.config.trajectory_rules import MOST_VERSION, reward_fault, scored_fault


class Scoring:
    """Leases of trajectories to scorers, and their scores, for all pools; earlier ones first."""

    def __init__(
        self,
        pools: Sequence[SamplePool],
        pool_of: Callable[[str], SamplePool],
        leases: LeaseTable,
        counters: Counter[str],
    ) -> None:
        self.serving: dict[str, str] = {}  # by scorer, the stage that it has asked for
        self._pools = pools
        self._pool_of = pool_of
        self._leases = leases
        self._counters = counters

    def waiting(self, stage: str) -> int:
        """Count the trajectories waiting in `stage`; some of them may be over."""
        return sum(len(pool.unscored.get(stage, ())) for pool in self._pools)

    def waiting_since(self, stage: str) -> float | None:
        return min(
            (
                sample.unscored_since
                for pool in self._pools
                for sample in pool.unscored.get(stage, ())
                if _waits(sample, pool, stage)
            ),
            default=None,
        )

    def take(self, stage: str, grant: Grant) -> None:
        """Lease samples that wait in `stage`; at least one group, if groups are scored whole."""
        for pool in self._pools:
            queue = pool.unscored.get(stage)
            while queue and grant.room > 0:
                sample = queue.popleft()
                samples = pool.scored_with(sample) if _waits(sample, pool, stage) else []
                if grant.tasks and len(samples) > grant.room:
                    queue.appendleft(sample)
                    return
                if samples:
                    pool.lease_scoring(samples, grant)

    def submit(
        self, scores: Sequence[tuple[Score, Packed]], holder: str, now: float
    ) -> dict[str, str]:
        """Accept the scores of a message; return why some are refused."""
        refused: dict[str, str] = {}
        leases: dict[str, dict[str, tuple[Score, Packed]]] = {}  # by first sample, by sample
        for score, packed in scores:
            sample = self._find(score, holder)
            pool = self._pool_of(score.sample_id)
            first = pool.scored_with(sample)[0].sample_id if sample is not None else ""
            if sample is None or score.sample_id in leases.get(first, ()):
                refused[score.sample_id] = self._refuse_late(1)
            else:
                leases.setdefault(first, {})[score.sample_id] = score, packed
        for own in leases.values():
            if fault := self._take(own, holder, now):
                refused |= dict.fromkeys(own, fault)
        return refused

    def _take(self, scores: dict[str, tuple[Score, Packed]], holder: str, now: float) -> str:
        """Accept the scores of one lease; return why they are refused, or ""."""
        sample = self._find(next(iter(scores.values()))[0], holder)
        if sample is None:  # its group ended by another score of the message
            return self._refuse_late(len(scores))
        pool = self._pool_of(sample.sample_id)
        samples, stage = pool.scored_with(sample), pool.stage_of(sample)
        for score, _ in scores.values():
            if score.error:
                pool.take_back(sample, lost=True, reason=score.error, own=True)
                return ""
        if fault := _faults(samples, stage, scores, pool):
            self._counters["malformed_scores"] += 1
            pool.take_back(sample, lost=True, reason=fault, own=True)
            return f"malformed: {fault}"
        for sample in samples:
            score, packed = scores[sample.sample_id]
            pool.scored(sample, packed, score.reward if stage == "reward" else 0.0, now)
            self._counters[f"scored: {stage}"] += 1
        return ""

    def _find(self, score: Score, holder: str) -> Sample | None:
        sample = self._leases.find(score.sample_id, score.attempt, holder)
        return sample if sample is not None and sample.state is State.SCORING else None

    def _refuse_late(self, scores: int) -> str:
        self._counters["late_scores"] += scores
        return "the sender no longer holds this lease"


def _waits(sample: Sample, pool: SamplePool, stage: str) -> bool:
    return sample.state is State.SCORING and pool.stage_of(sample) == stage and not sample.holder


def _faults(
    samples: Sequence[Sample],
    stage: str,
    scores: dict[str, tuple[Score, Packed]],
    pool: SamplePool,
) -> str | None:
    if len(scores) < len(samples):
        return f"{len(scores)} scores for the {len(samples)} samples of a group"
    faults = (_fault(sample, stage, *scores[sample.sample_id], pool) for sample in samples)
    return next((fault for fault in faults if fault is not None), None)


def _fault(
    sample: Sample, stage: str, score: Score, packed: Packed, pool: SamplePool
) -> str | None:
    if fault := size_fault(packed, len(score.logprobs or b"")):
        return fault
    if stage == "reward":
        parts = score.reward_parts
        if parts and sample.reward_parts:  # else there are no other names than these
            parts = pool.trajectory_store.get(sample.sample_id).reward_parts | parts
        return reward_fault(sample.reward + score.reward, parts)
    if not -1 <= score.version <= MOST_VERSION:
        return f"version is {score.version}"
    return scored_fault(score.logprobs, sample.tokens)
