"""What generators send back: trajectories, partials and failures, each judged once."""

from __future__ import annotations

import logging

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import Trajectory, array_bytes
from umbra.services.buffer.samples.groups import Sample, State
from umbra.services.buffer.samples.ledger import count_reason
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import MORE_BYTES, Packed, pack, size_fault
from umbra.services.buffer.state import RunState
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.config.trajectory_rules import find_fault

MALFORMED = "malformed: "  # begins the reason of such a refusal

log = logging.getLogger(__name__)


class Answers:
    """Accepts answers that are sound, in time and asked for; counts the rest.

    Tokens of a pinned pool, of eval samples, must all be of the pinned version.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._pool_of = run.pool_of
        self._batches = run.batches
        self._counters = run.counters
        self.sound: set[str] = set()  # members whose answers were accepted

    def submit(self, trajectory: Trajectory, packed: Packed, sender: str, now: float) -> str | None:
        """Accept a complete trajectory, or return why it is refused.

        A repeated answer is accepted again, a late one while nobody else has the sample.
        """
        if self.is_accepted(trajectory.sample_id, trajectory.attempt):
            self._counters["duplicate_submits"] += 1
            return None
        pool = self._pool_of(trajectory.sample_id)
        sample = pool.samples.get(trajectory.sample_id)
        if sample is None:
            outcome = pool.over.get(trajectory.sample_id)
            if outcome is None:
                return self._refuse("unknown_sample", "no such sample, or it was over long ago")
            return self._refuse("late_answers", f"over: {outcome.end}")
        if sample.attempt != trajectory.attempt or not sample.attempt:
            return self._refuse(
                "wrong_attempt", f"lease {trajectory.attempt} was lost, {sample.attempt} is newest"
            )
        if sample.state is State.GENERATING and sample.holder != sender:
            return self._refuse("wrong_holder", f"{sample.holder} has the lease")
        fault = self._fault(pool, sample, trajectory)
        if fault is None and len(packed) > MORE_BYTES:  # else whatever its arrays take
            fault = size_fault(packed, array_bytes(trajectory), len(trajectory.branches))
        if fault is not None:
            log.warning("%s sent a malformed %s: %s", sender, sample.sample_id, fault)
            if sample.state is State.GENERATING:
                # It may be the sample's fault only if other answers of the sender are sound.
                lost, own = sender in self.sound, self.sound == {sender}
                pool.take_back(sample, lost=lost, reason=f"malformed answer: {fault}", own=own)
            return self._refuse("malformed_trajectory", f"{MALFORMED}{fault}")
        unfit = self._unfit(pool, sample, trajectory)
        if unfit is not None:
            if pool.pinned:
                self._counters["mixed_eval_samples"] += 1
                pool.again(sample)
            else:
                pool.end(sample.group, "stale")
            return self._refuse("stale_answers", unfit)
        if sample.state is State.QUEUED:
            self._counters["late_accepted"] += 1
        pool.accept(sample, trajectory, packed, now)
        self.sound.add(sender)
        self._counters["accepted"] += 1
        if trajectory.branches:
            self._counters["accepted_with_branches"] += 1
        if not pool.pinned:
            self._run.health.answered(trajectory)
        return None

    def hand_back(self, returned: ReturnedSample, sender: str) -> None:
        pool = self._pool_of(returned.sample_id)
        sample = _leased(pool, returned.sample_id, returned.attempt, sender)
        if sample is None:
            self._counters["late_returns"] += 1
            return
        if returned.failed:
            self._count_failure(sample, returned.reason, sender)
            pool.fail(sample, returned.reason or "no reason given", own=True)
            return
        if returned.partial is not None:
            self._keep(pool, sample, returned.partial, sender)
        self._counters["returned"] += 1
        pool.take_back(sample, lost=False)

    def flush(self, partial: Trajectory, sender: str, now: float) -> bool:
        """Store a partial whose sample goes on; False if `sender` has no lease on it."""
        pool = self._pool_of(partial.sample_id)
        sample = _leased(pool, partial.sample_id, partial.attempt, sender)
        if sample is None:
            self._counters["late_flushes"] += 1
            return False
        self._keep(pool, sample, partial, sender)
        self._counters["flushed"] += 1
        pool.leases.renew(sample, now)
        return True

    def _keep(self, pool: SamplePool, sample: Sample, partial: Trajectory, sender: str) -> None:
        fault = self._fault(pool, sample, partial)
        if fault is None and partial.branches:
            fault = "a partial has branches, which nobody can go on with"
        if fault is None:
            pool.keep(sample, partial, pack(partial))
        else:
            self._counters["malformed_partial"] += 1
            log.warning("%s sent a malformed part of %s: %s", sender, sample.sample_id, fault)

    def _unfit(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str | None:
        """Return the staleness reason, or None if trainable."""
        oldest, version, due = trajectory.oldest_version, self._batches.version, sample.group.due
        if pool.pinned:
            if oldest == trajectory.newest_version == due:
                return None
            return f"an eval sample of version {due} has tokens of another version"
        if not self._run.policy.is_stale(oldest, version):
            return None
        return f"stale: a token of version {oldest}, the trainer is at {version}"

    def is_accepted(self, sample_id: str, attempt: int) -> bool:
        pool = self._pool_of(sample_id)
        sample = pool.samples.get(sample_id)
        if sample is not None:
            answered = sample.state in (State.SCORING, State.READY, State.TRAINING)
            return answered and sample.attempt == attempt
        outcome = pool.over.get(sample_id)
        return outcome is not None and attempt > 0 and outcome.attempt == attempt

    def _fault(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str | None:
        group = sample.group
        if (trajectory.sample_id, trajectory.attempt) != (sample.sample_id, sample.attempt):
            return "sample_id or attempt is not that of the lease"
        if (trajectory.group_id, trajectory.prompt_id) != (group.group_id, group.prompt.prompt_id):
            return "group_id or prompt_id is not that of the sample"
        newest = self._batches.newest
        return find_fault(trajectory, self._run.facts, newest, trained=not pool.pinned)

    def _refuse(self, counter: str, reason: str) -> str:
        self._counters[counter] += 1
        return reason

    def _count_failure(self, sample: Sample, reason: str, sender: str) -> None:
        self._counters["environment_failures"] += 1
        prompt = sample.group.prompt
        name = prompt.row.get(ENVIRONMENT)
        if name and prompt.prompt_id.startswith(environment_prefix(str(name))):  # one of several
            self._counters[f"environment_failures: {name}"] += 1
        if count_reason(self._counters, reason):
            log.warning("%s failed at %s: %s", sample.sample_id, sender, reason)


def _leased(pool: SamplePool, sample_id: str, attempt: int, sender: str) -> Sample | None:
    sample = pool.leases.find(sample_id, attempt, sender)
    return sample if sample is not None and sample.state is State.GENERATING else None
