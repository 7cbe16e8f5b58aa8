"""Batches of complete groups, and admission: which samples and new groups generators may have.

A batch is formed once per step, leased to the trainer, and ended by its commit. Committed ones are
kept in the store for a trainer that starts again, until a checkpoint covers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.groups import Grant, Group, Sample, State
from umbra.services.buffer.samples.journal import (
    check_whole,
    group_record,
    make_group,
    sample_ids,
    unfit,
)
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessPolicy, StalenessStats


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The batch of one step; the trainer gets this very one however often it asks."""

    step: int
    groups: list[Group]
    staleness: StalenessStats
    formed_at: float  # seconds of the broker's clock

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


@dataclass(eq=False)
class Batches:
    """The trainer's version and the batches under way."""

    pool: SamplePool
    policy: StalenessPolicy
    prompts: PromptFeed
    wait: bool  # for groups that would be stale after a batch (`buffer.stale_policy`)

    version: int = 0
    newest: int = 0  # highest version there ever was: a trainer that starts again falls behind
    checkpoint: int | None = None  # newest step that a checkpoint covers
    # By step; more than one only after a trainer's restart.
    formed: dict[int, StoredBatch] = field(default_factory=dict[int, StoredBatch])
    kept: list[int] = field(default_factory=list[int])  # committed steps, in order, without a gap
    trained: StalenessStats = field(default_factory=StalenessStats)
    last: StalenessStats = field(default_factory=StalenessStats)  # of the newest committed batch
    _waiting_at: tuple[int, int, int] | None = None  # what `_choose` saw when it had to wait

    @property
    def next_step(self) -> int:
        return self.version + 1

    @property
    def leased(self) -> StoredBatch | None:
        return self.formed.get(self.next_step)

    @property
    def untrained(self) -> int:
        """Return u of the staleness rules: groups issued, but neither ended nor committed."""
        return len(self.pool.groups) + sum(len(batch.groups) for batch in self.formed.values())

    def take(self, grant: Grant, waiting: int) -> None:
        """Lease samples to a generator, by the admission, lease and partial rules of `staleness`.

        Groups are issued only when a generator asks and nothing is queued, so the batch that a
        group counts for is decided by the samples in flight. `waiting` other generators want work
        too: each gets an equal share, so that the first to ask does not leave the others idle.
        """
        pool, most = self.pool, grant.capacity
        if waiting:
            available = pool.ledger.in_flight["queued"]
            available += max(self._room, 0) * pool.config.group_size
            most = min(most, len(grant.tasks) - (-available // (1 + waiting)))
        while len(grant.tasks) < most and grant.room > 0:
            sample = self._next(grant.version)
            if sample is None:
                break
            if sample.oldest is not None:
                if sample.oldest < self.required_version(sample):
                    pool.drop_partial(sample)
                    pool.counters["partials_too_old"] += 1
                else:
                    pool.counters["partials_continued"] += 1
            pool.lease(sample, grant)

    @property
    def _room(self) -> int:
        return 0 if self.pool.blocked else self.policy.room(self.untrained, self.version)

    def _next(self, version: int) -> Sample | None:
        sample = self.pool.next_queued()
        if sample is None:
            if self._room <= 0:
                return None
            due = self.policy.due_version(self.untrained, self.version)
            if version < self.policy.required_version(due, self.version):
                return None
            sample = self.pool.issue(next(self.prompts), due).samples[0]
        return sample if version >= self.required_version(sample) else None

    def required_version(self, sample: Sample) -> int:
        return self.policy.required_version(sample.group.due, self.version)

    def form(self, now: float) -> StoredBatch | None:
        if self.leased is None:
            groups = self._choose()
            if groups is None:
                return None
            self.pool.start_training(groups)
            ages = Counter((s.oldest, s.newest) for group in groups for s in group.samples)
            staleness = StalenessStats()
            for (oldest, newest), samples in ages.items():
                assert oldest is not None
                staleness.add(oldest, newest, self.version, samples)
            self._open(StoredBatch(self.next_step, groups, staleness, now))
        return self.leased

    def commit(self) -> StoredBatch:
        """End the leased batch as trained: the version goes up, and stale groups go."""
        batch = self.formed.pop(self.next_step)
        keep = self.pool.journal.store.durable
        if keep:  # the groups are about to end, so their records go with it
            self._write(batch, [group_record(group) for group in batch.groups], is_open=False)
            self.kept.append(batch.step)
        else:
            self._forget(batch.step)
        self.pool.finish_training(batch.groups, keep=keep)
        self.version = batch.step
        self.newest = max(self.newest, self.version)
        self.trained.merge(batch.staleness)
        self.last = batch.staleness
        self.sweep()
        return batch

    def can_rewind(self, step: int) -> bool:
        return bool(self.kept) and self.kept[0] <= step <= self.version == self.kept[-1]

    def rewind(self, step: int, now: float) -> None:
        """Hand out the batches from `step` on again, whose steps the trainer has lost.

        `can_rewind` must hold. Batches formed since then wait for their turn.
        """
        for lost in range(step, self.version + 1):
            record = self.pool.journal.read(f"b/{lost}")
            self.kept.remove(lost)
            groups = [make_group(group) for group in record["groups"]]
            staleness = StalenessStats(**record["staleness"])
            self._open(StoredBatch(lost, groups, staleness, now))
            self.pool.reopen_training(groups)
            self.trained.merge(staleness, -1)
        self.version = step - 1

    def restore(self, live: list[Group], trajectories: Mapping[str, int], now: float) -> None:
        """Read back the batches of `live` groups; arguments and errors as of `check_whole`."""
        for group in live:  # under a higher bound they may be due later than anybody can serve
            group.due = min(group.due, self.version + self.policy.bound)
        groups_of = {group.group_id: group for group in live}
        for step in sorted(int(key[2:]) for key in self.pool.journal.store.keys("b/")):
            record = self.pool.journal.read(f"b/{step}")
            if not record["is_open"]:
                for group in map(make_group, record["groups"]):
                    check_whole(group, trajectories)
                self.kept.append(step)
                continue
            names: list[str] = record["groups"]
            if lost := set(names) - groups_of.keys():
                raise unfit(f"group {min(lost)} of the batch of step {step} is gone")
            groups = [groups_of[name] for name in names]
            batch = StoredBatch(step, groups, StalenessStats(**record["staleness"]), now)
            for sample in batch.samples:
                sample.state = State.TRAINING  # a formed batch does not write its groups again
            self.formed[step] = batch

    def cover(self, step: int) -> None:
        """Let go of the batches up to `step`, which a checkpoint covers."""
        self.checkpoint = max(step, self.checkpoint or 0)
        self.drop_through(self.checkpoint)

    def drop_through(self, step: int) -> None:
        """Forget the committed batches up to `step`, and their trajectories."""
        while self.kept and self.kept[0] <= step:
            oldest = self.kept.pop(0)
            for record in self.pool.journal.read(f"b/{oldest}")["groups"]:
                for sample_id in sample_ids(record):
                    self.pool.journal.drop(sample_id)
            self._forget(oldest)

    def cancel(self) -> None:
        for step, batch in self.formed.items():
            self._forget(step)
            for group in batch.groups:
                self.pool.end(group, "cancelled")
        self.formed.clear()

    def _choose(self) -> list[Group] | None:
        """Return the next batch, urgent groups first, as they were completed; None = too few."""
        complete, count = self.pool.complete, self.policy.batch_groups
        state = self.version, self.pool.completions, len(self.pool.groups)
        if len(complete) < count or state == self._waiting_at:
            return None  # asked at every event, so it must be cheap
        first, awaited = self.urgent()
        if awaited:
            self._waiting_at = state
            return None
        return list(islice(dict.fromkeys(chain(first, complete.values())), count))

    def urgent(self) -> tuple[list[Group], list[Group]]:
        """Return complete groups that the next batch must have, and groups of which it lacks some.

        Under `wait` groups with tokens of version o or older are trained up to version o + K.
        Batches after the next take (o + K - v) B of them, so the next one must take the others.
        """
        by_age: dict[int, list[Group]] = {}
        for group in self.pool.groups.values() if self.wait else ():
            if (oldest := group.oldest) is not None:
                by_age.setdefault(oldest, []).append(group)
        count, older, first = self.policy.batch_groups, list[Group](), list[Group]()
        spare: list[Group] = []  # complete, and not among the first
        for oldest in sorted(by_age):
            older += by_age[oldest]
            spare += [group for group in by_age[oldest] if group.completed]
            later = (oldest + self.policy.bound - self.version) * count
            lacking = max(min(len(older) - later, count) - len(first), 0)
            if lacking > len(spare):
                return first + spare, [group for group in older if not group.completed]
            first, spare = first + spare[:lacking], spare[lacking:]
        return first, []

    def sweep(self) -> None:
        """End groups with stale samples; partials are judged when leased again."""
        if self.version <= self.policy.bound:
            return  # not even version 0 is
        for group in list(self.pool.groups.values()):
            made = (s.oldest for s in group.samples if s.state in (State.SCORING, State.READY))
            if any(self.policy.is_stale(oldest, self.version) for oldest in made):
                self.pool.end(group, "stale")

    def _open(self, batch: StoredBatch) -> None:
        """Keep a new batch, written as the names of its groups, which are live and kept as such."""
        self.formed[batch.step] = batch
        self._write(batch, [group.group_id for group in batch.groups], is_open=True)

    def _write(self, batch: StoredBatch, groups: list[Any], *, is_open: bool) -> None:
        record = {"groups": groups, "staleness": batch.staleness, "is_open": is_open}
        self.pool.journal.write(f"b/{batch.step}", record)

    def _forget(self, step: int) -> None:
        self.pool.journal.store.delete(f"b/{step}")
