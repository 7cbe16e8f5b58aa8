"""The life of samples and their groups; pure state, moved by the broker.

    queued -> generating -> scoring -> ready -> training -> trained
       ^----------'       any of the first five -> ended(reason)

A sample that is taken back is queued before those that nobody has had yet, oldest first, and keeps
its last partial. Groups are trained as a whole; they end as a whole too, unless they may go on with
the survivors. Every operation costs O(1) or O(log n) on average.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.proto.records import SAMPLE, Score, Task, Trajectory
from umbra.services.buffer.health import Health, SampleFailure
from umbra.services.buffer.samples.groups import (
    Grant,
    Group,
    LeaseTable,
    Sample,
    State,
)
from umbra.services.buffer.samples.journal import Journal
from umbra.services.buffer.samples.ledger import RunningLedger, count_reason
from umbra.services.buffer.samples.trajectories import Packed, pack
from umbra.services.config import BufferConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.prompts import Prompt

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SamplePool:
    """All samples in flight and the ledger over them.

    The journal's stages are passed before a sample is ready. Its prefix, if any, is that of eval
    samples, all of whose tokens must be of version `due` of their group.
    """

    journal: Journal
    config: BufferConfig
    leases: LeaseTable
    counters: Counter[str]
    together: str  # stage in which all samples of a group are scored at once; empty = none
    only: frozenset[str]  # environments that this is for; none = all
    on_failure: Callable[[SampleFailure], None]
    health: Health | None = None  # told of complete groups and stale answers

    blocked: str = ""  # why no new group may be issued, if so
    openings: int = 0  # counts whatever may let a waiting generator have work
    filtered_in_a_row: int = 0
    next_group: int = 0
    next_sample: int = 0
    completions: int = 0

    def __post_init__(self) -> None:
        self.pinned = bool(self.journal.prefix)
        self.stages = self.journal.stages
        self.ledger = RunningLedger()
        self.samples: dict[str, Sample] = {}
        self.groups: dict[str, Group] = {}  # not yet in training, in order of issue
        self.complete: dict[str, Group] = {}  # all samples ready, in order of completion
        self.unscored: dict[str, deque[Sample]] = {stage: deque() for stage in self.stages}
        self._queue: list[tuple[int, Sample]] = []  # a heap; some are queued no more
        self._waiting: dict[str, Group] = {}  # groups of which some samples are ready

    def issue(self, prompt: Prompt, due: int, size: int = 0) -> Group:
        """Queue a new group of `size` samples for `prompt`; 0 = `buffer.group_size`."""
        size, prefix = size or self.config.group_size, self.journal.prefix
        group = Group(f"{prefix}g-{self.next_group}", prompt, due)
        self.next_group += 1
        for _ in range(size):
            sample = Sample(self.next_sample, f"{prefix}s-{self.next_sample}", group)
            self.next_sample += 1
            group.samples.append(sample)
            self.samples[sample.sample_id] = sample
            heapq.heappush(self._queue, (sample.serial, sample))
        self.groups[group.group_id] = group
        self.ledger.issue(size)
        self.journal.touch(group)
        return group

    def next_queued(self) -> Sample | None:
        while self._queue and self._queue[0][1].state is not State.QUEUED:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def lease(self, sample: Sample, grant: Grant) -> None:
        """Lease `sample`, the next queued one."""
        heapq.heappop(self._queue)
        self._move(sample, State.GENERATING)
        sample.attempt += 1
        sample.leased_version = grant.version
        self.leases.add(sample, grant)
        self.hand_out(sample, grant)

    def lease_scoring(self, samples: Sequence[Sample], grant: Grant) -> None:
        attempt = max(sample.score_attempts for sample in samples) + 1
        for sample in samples:
            sample.score_attempts = attempt
            self.leases.add(sample, grant)
            self.hand_out(sample, grant)
        self.journal.touch(samples[0].group)

    def hand_out(self, sample: Sample, grant: Grant) -> None:
        """Add the task of the leased `sample` to `grant`."""
        group, scoring = sample.group, sample.state is State.SCORING
        row: Any = msgspec.Raw(group.packed_row())
        has_any = sample.oldest is not None
        packed = self.journal.packed(sample.sample_id) if has_any else b""
        trajectory: Any = msgspec.Raw(packed) if has_any else None
        task = Task(
            kind=self.stage_of(sample) if scoring else SAMPLE,
            sample_id=sample.sample_id,
            attempt=sample.lease_attempt,
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            row=row,
            lease_s=self.leases.lease_s,
            trajectory=trajectory,
            pinned_version=group.due if self.pinned and not scoring else -1,
        )
        grant.tasks.append(task)
        grant.filled += len(group.row) + len(packed)

    def cut_stragglers(self, now: float) -> None:
        """Drop stragglers from groups that have waited `straggler_s` for them."""
        least, straggler_s = self.config.min_survivors, self.config.straggler_s
        if not straggler_s:
            return  # no group goes on without its stragglers, and there may be thousands
        for group in list(self._waiting.values()):
            overdue = now - group.first_ready_at >= straggler_s
            if overdue and least <= group.ready < len(group.samples):
                slow = [sample for sample in group.samples if sample.state is not State.READY]
                log.info("group %s goes on without %d stragglers", group.group_id, len(slow))
                self.counters["stragglers_cut"] += len(slow)
                self.cut(group, slow, "cancelled")

    def keep(self, sample: Sample, trajectory: Trajectory, packed: Packed) -> None:
        self.journal.put(sample.sample_id, packed)
        sample.oldest = trajectory.oldest_version
        sample.newest = trajectory.newest_version
        sample.tokens = trajectory.sample_tokens
        self.journal.touch(sample.group)

    def drop_partial(self, sample: Sample) -> None:
        self.journal.drop(sample.sample_id)
        sample.oldest = None
        self.journal.touch(sample.group)

    def take_back(self, sample: Sample, *, lost: bool, reason: str = "", own: bool = False) -> None:
        """End the lease on `sample`, and on those scored with it; requeue them in their stage.

        A `lost` one counts as an attempt, `max_attempts` of which fail the sample; one handed back
        does not. `reason` says why, if that is more than silence; `own` as of `fail`.
        """
        stage = self.stage_of(sample) if sample.state is State.SCORING else ""
        samples = self.scored_with(sample) if stage else [sample]
        for each in samples:
            self.leases.release(each)
            each.lost += lost
        self.journal.touch(sample.group)
        if lost and stage:
            self.counters["scoring_retries"] += 1
        losses = max(each.lost for each in samples)
        if losses < self.config.max_attempts:
            if stage:
                self.unscored[stage].extendleft(reversed(samples))
            else:
                self._requeue(sample)
            return
        self.counters["scoring_failures" if stage else "attempts_exhausted"] += 1
        reason = f"{stage}: {reason}" if stage else reason or f"{losses} leases were lost"
        if not stage or count_reason(self.counters, reason):
            what = f"sample {sample.sample_id}"
            if len(samples) > 1:
                what = f"group {sample.group.group_id}, {len(samples)} samples"
            log.warning("%s failed %s", what, f"in stage {reason}" if stage else f"({reason})")
        self.fail(sample, reason, own=own)

    def accept(self, sample: Sample, trajectory: Trajectory, packed: Packed, now: float) -> None:
        self.leases.release(sample)
        self.keep(sample, trajectory, packed)
        sample.stage = sample.lost = 0
        sample.reward, sample.reward_parts = trajectory.reward, len(trajectory.reward_parts)
        self._advance(sample, now)

    def scored(self, sample: Sample, packed: Packed, reward: float, now: float) -> None:
        self.leases.release(sample)
        self.journal.put(sample.sample_id, packed, self.stage_of(sample))
        sample.stage += 1
        sample.reward += reward
        sample.lost = 0
        self.journal.touch(sample.group)
        self._advance(sample, now)

    def stage_of(self, sample: Sample) -> str:
        return self.stages[sample.stage]

    def scores_together(self, prompt: Prompt) -> bool:
        """True if all answers to `prompt` are scored at once in some stage."""
        return bool(self.together) and (not self.only or prompt.row.get(ENVIRONMENT) in self.only)

    def is_unscored(self, sample: Sample, stage: str) -> bool:
        """True if `sample` waits for a scorer of `stage`."""
        return (
            sample.state is State.SCORING and not sample.holder and self.stage_of(sample) == stage
        )

    def scored_with(self, sample: Sample) -> list[Sample]:
        """Return the samples that are scored at once with `sample`: itself, or its whole group.

        Empty while others of the group have not reached the stage.
        """
        if self.stage_of(sample) != self.together:
            return [sample]
        group = sample.group.samples
        together = all(s.state is State.SCORING and s.stage == sample.stage for s in group)
        return list(group) if together else []

    def again(self, sample: Sample) -> None:
        """Discard progress and requeue `sample`, even if leased."""
        self.drop_partial(sample)
        if sample.state is State.QUEUED:
            return
        group = sample.group
        if sample.state is State.READY:
            group.ready -= 1
            group.completed = 0
            self.complete.pop(group.group_id, None)
        sample.stage = sample.lost = 0
        self._requeue(sample)
        self._score_again(group)

    def fail(self, sample: Sample, reason: str, *, own: bool) -> None:
        """Fail `sample`: its group goes on without it, or ends as failed.

        `own`: the `reason` may depend on its content.
        """
        group = sample.group
        alone = self.config.straggler_s > 0 and len(group.samples) > self.config.min_survivors
        count = 1 if alone else len(group.samples)
        prompt_id = group.prompt.prompt_id
        self.on_failure(SampleFailure(sample.sample_id, prompt_id, reason, count, own))
        if alone:
            self.cut(group, [sample], "failed")
        else:
            self.end(group, "failed")

    def cut(self, group: Group, samples: Sequence[Sample], reason: str) -> None:
        for sample in samples:
            self._end(sample, reason)
            group.samples.remove(sample)
        self.openings += 1
        self._complete(group)

    def end(self, group: Group, reason: str) -> None:
        if reason == "stale" and self.health is not None:
            self.health.dropped(sum(sample.tokens > 0 for sample in group.samples))
        for sample in group.samples:
            self._end(sample, reason)
        for where in (self.groups, self.complete, self._waiting):
            where.pop(group.group_id, None)
        self.openings += 1

    def start_training(self, groups: list[Group]) -> None:
        """Move the complete `groups` into a batch, whose record says that they are in training."""
        for group in groups:
            for sample in group.samples:
                self.ledger.move(sample.state, State.TRAINING)
                sample.state = State.TRAINING
            del self.groups[group.group_id], self.complete[group.group_id]

    def finish_training(self, groups: list[Group], *, keep: bool) -> None:
        """End `groups` as trained; drop their trajectories unless a restart may need them."""
        for sample in (sample for group in groups for sample in group.samples):
            self.ledger.train()
            self._finish(sample)
            if not keep:
                self.journal.drop(sample.sample_id)
        self.openings += 1

    def reopen_training(self, groups: list[Group]) -> None:
        """Take back trained `groups`, read from the store."""
        for group in groups:
            self.ledger.train(-len(group.samples))
            for sample in group.samples:
                sample.state = State.TRAINING
                self.samples[sample.sample_id] = sample
            self.journal.touch(group)

    def restore(self, groups: list[Group], now: float) -> None:
        """Take over stored `groups`; leases continue with a new deadline."""
        for group in groups:
            for sample in group.samples:
                self.samples[sample.sample_id] = sample
                sample.leased_at = sample.unscored_since = now
                self.ledger.in_flight[sample.state] += 1
                if sample.holder:
                    self.leases.add(sample, Grant(sample.holder, sample.asked, 0, now))
                elif sample.state is State.QUEUED:
                    heapq.heappush(self._queue, (sample.serial, sample))
                elif sample.state is State.SCORING and self.scored_with(sample):
                    self.unscored[self.stage_of(sample)].append(sample)
            if not any(sample.state is State.TRAINING for sample in group.samples):
                self.groups[group.group_id] = group
                if group.ready and not group.completed:
                    group.first_ready_at = now
                    self._waiting[group.group_id] = group
        complete = [group for group in self.groups.values() if group.completed]
        complete.sort(key=lambda group: group.completed)
        self.complete = {group.group_id: group for group in complete}

    def _advance(self, sample: Sample, now: float) -> None:
        group = sample.group
        stages = self.stages[sample.stage :]
        if stages and stages[0] == self.together and not self.scores_together(group.prompt):
            nothing = pack(Score(sample_id=sample.sample_id, attempt=0))
            self.journal.put(sample.sample_id, nothing, stages[0])
            sample.stage += 1
        if sample.stage < len(self.stages):
            if sample.state is not State.SCORING:
                self._move(sample, State.SCORING)
            for each in self.scored_with(sample):
                each.unscored_since = now
                self.unscored[self.stage_of(each)].append(each)
            return
        self._move(sample, State.READY)
        if not group.ready:
            group.first_ready_at = now
        group.ready += 1
        self._waiting[group.group_id] = group
        self._complete(group)

    def _complete(self, group: Group) -> None:
        """Make `group` trainable, or replace it, if all its samples are ready."""
        if not group.is_ready:
            return
        self._waiting.pop(group.group_id, None)
        rewards = [sample.reward for sample in group.samples]
        if self.health is not None:
            self.health.group(rewards)
        if self.config.dynamic_sampling and len(set(rewards)) == 1:  # which gives no gradient
            if self.filtered_in_a_row < self.config.max_filtered:
                self.filtered_in_a_row += 1
                self.counters["filtered_groups"] += 1
                self.end(group, "filtered")
                return
            self.counters["level_groups_kept"] += 1
        self.filtered_in_a_row = 0
        self.completions = group.completed = self.completions + 1
        self.complete[group.group_id] = group

    def _score_again(self, group: Group) -> None:
        """Void leases and scores of a group that is scored at once, if one response is new."""
        if self.together not in self.stages or not self.scores_together(group.prompt):
            return
        stage = self.stages.index(self.together)
        for sample in group.samples:
            at_stage = sample.state is State.SCORING and sample.stage == stage
            if at_stage and not self.scored_with(sample):
                self.leases.release(sample)
        scored = [sample for sample in group.samples if sample.stage > stage]
        if not 0 < len(scored) < len(group.samples):
            return
        self.journal.touch(group)
        for sample in scored:
            self.leases.release(sample)
            sample.stage, sample.lost = stage, 0
            sample.reward = self.journal.trajectory(sample.sample_id).reward
            if sample.state is State.READY:
                group.ready -= 1
                self._move(sample, State.SCORING)
        group.completed = 0
        self.complete.pop(group.group_id, None)
        if not group.ready:
            self._waiting.pop(group.group_id, None)

    def _requeue(self, sample: Sample) -> None:
        self._move(sample, State.QUEUED)
        self.leases.release(sample)
        heapq.heappush(self._queue, (sample.serial, sample))
        self.openings += 1

    def _end(self, sample: Sample, reason: str) -> None:
        self.ledger.end(sample.state, reason)
        self._finish(sample)
        self.journal.drop(sample.sample_id)

    def _move(self, sample: Sample, target: State) -> None:
        self.ledger.move(sample.state, target)
        sample.state = target
        self.journal.touch(sample.group)

    def _finish(self, sample: Sample) -> None:
        self.leases.release(sample)
        sample.state = State.OVER
        self.journal.touch(sample.group)
        del sample.group  # its group has it: a cycle would keep both until a collection, which
        del self.samples[sample.sample_id]  # looks at everything and holds up all who ask
