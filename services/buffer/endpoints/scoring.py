"""Scoring stages: trajectories go through them in order, each served by any number of workers.

A worker that dies, hangs or runs into an error costs an attempt; after `max_attempts` the sample
fails. Where a stage scores whole groups, a group is leased, scored, lost and failed as one: its
scores come in one message, and are taken all or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from umbra.proto.records import Score
from umbra.services.buffer.samples.groups import Grant, Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import Packed, size_fault
from umbra.services.buffer.state import RunState
from umbra.services.config.trajectory_rules import MOST_VERSION, reward_fault, scored_fault


def take(run: RunState, stage: str, grant: Grant) -> None:
    """Lease samples that wait in `stage`; at least one group, if groups are scored whole."""
    for pool in run.pools:
        queue = pool.unscored.get(stage)
        while queue and grant.room > 0:
            sample = queue.popleft()
            samples = pool.scored_with(sample) if pool.is_unscored(sample, stage) else []
            if grant.tasks and len(samples) > grant.room:
                queue.appendleft(sample)
                return
            if samples:
                pool.lease_scoring(samples, grant)


def submit(
    run: RunState, scores: Sequence[tuple[Score, Packed]], holder: str, now: float
) -> dict[str, str]:
    """Accept the scores of a message; return why some are refused."""
    refused: dict[str, str] = {}
    leases: dict[str, dict[str, tuple[Score, Packed]]] = {}  # by first sample, by sample
    for score, packed in scores:
        sample = _leased(run, score, holder)
        pool = run.pool_of(score.sample_id)
        first = pool.scored_with(sample)[0].sample_id if sample is not None else ""
        if sample is None or score.sample_id in leases.get(first, ()):
            refused[score.sample_id] = _refuse_late(run, 1)
        else:
            leases.setdefault(first, {})[score.sample_id] = score, packed
    for own in leases.values():
        if fault := _take_lease(run, own, holder, now):
            refused |= dict.fromkeys(own, fault)
    return refused


def _take_lease(
    run: RunState, scores: dict[str, tuple[Score, Packed]], holder: str, now: float
) -> str:
    """Accept the scores of one lease; return why they are refused, or ""."""
    sample = _leased(run, next(iter(scores.values()))[0], holder)
    if sample is None:  # its group ended by another score of the message
        return _refuse_late(run, len(scores))
    pool = run.pool_of(sample.sample_id)
    samples, stage = pool.scored_with(sample), pool.stage_of(sample)
    for score, _ in scores.values():
        if score.error:
            pool.take_back(sample, lost=True, reason=score.error, own=True)
            return ""
    fault: str | None = None
    if len(scores) < len(samples):
        fault = f"{len(scores)} scores for the {len(samples)} samples of a group"
    for each in samples:
        fault = fault or _fault(pool, each, stage, *scores[each.sample_id])
    if fault:
        run.counters["malformed_scores"] += 1
        pool.take_back(sample, lost=True, reason=fault, own=True)
        return f"malformed: {fault}"
    for each in samples:
        score, packed = scores[each.sample_id]
        pool.scored(each, packed, score.reward if stage == "reward" else 0.0, now)
        run.counters[f"scored: {stage}"] += 1
    return ""


def _leased(run: RunState, score: Score, holder: str) -> Sample | None:
    sample = run.leases.find(score.sample_id, score.attempt, holder)
    return sample if sample is not None and sample.state is State.SCORING else None


def _refuse_late(run: RunState, scores: int) -> str:
    run.counters["late_scores"] += scores
    return "the sender no longer holds this lease"


def _fault(
    pool: SamplePool, sample: Sample, stage: str, score: Score, packed: Packed
) -> str | None:
    if fault := size_fault(packed, len(score.logprobs or b"")):
        return fault
    if stage == "reward":
        parts = score.reward_parts
        if parts and sample.reward_parts:  # else there are no other names than these
            parts = pool.journal.trajectory(sample.sample_id).reward_parts | parts
        return reward_fault(sample.reward + score.reward, parts)
    if not -1 <= score.version <= MOST_VERSION:
        return f"version is {score.version}"
    return scored_fault(score.logprobs, sample.tokens)
