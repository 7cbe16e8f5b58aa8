"""Batches of complete groups: formed once per step, leased to the trainer, ended by its commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from umbra.services.buffer.policy.replays import Replays
from umbra.services.buffer.policy.selection import BatchRules
from umbra.services.buffer.policy.staleness import StalenessPolicy, StalenessStats
from umbra.services.buffer.samples.ages import Ages
from umbra.services.buffer.samples.groups import Group, Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.store.archive import Archive, StoredBatch


class Batches:
    """The trainer's version and the batches under way.

    Args:
        pool: where the groups come from.
        policy: the staleness rules.
        rules: of putting a batch together.
        restart_stale: what is too old is generated anew, instead of ending with its group.
        archive: keeps batches.
        replays: what may be trained on again.
    """

    def __init__(
        self,
        pool: SamplePool,
        policy: StalenessPolicy,
        rules: BatchRules,
        archive: Archive,
        replays: Replays,
        *,
        restart_stale: bool = False,
    ) -> None:
        self.version = 0
        self.newest = 0  # highest version there ever was: a trainer that starts again falls behind
        self.checkpoint: int | None = None  # newest step that a checkpoint covers
        # By step; more than one only after a trainer's restart.
        self.formed: dict[int, StoredBatch] = {}
        self.trained = StalenessStats()
        self.last = StalenessStats()  # of the newest committed batch
        self.archive = archive
        self.replays = replays
        self._pool = pool
        self._policy = policy
        self._rules = rules
        self._restart_stale = restart_stale
        if rules.wait:
            pool.ages = Ages(pool.groups)

    @property
    def next_step(self) -> int:
        """The step whose batch may be leased."""
        return self.version + 1

    @property
    def leased(self) -> StoredBatch | None:
        """The batch of the next step, if it was formed."""
        return self.formed.get(self.next_step)

    @property
    def untrained(self) -> int:
        """Groups that were issued and neither ended nor committed: u of the staleness rules."""
        return len(self._pool.groups) + sum(len(batch.groups) for batch in self.formed.values())

    def form(self, now: float) -> StoredBatch | None:
        """The batch of the next step, formed if there was none; None while groups are missing."""
        if self.leased is None:
            chosen = self._rules.choose(self._pool, self._policy, self.replays, self.version)
            if chosen is None:
                return None
            groups = [group for group in chosen if not group.steps]
            self._pool.start_training(groups)
            ages = Counter((s.oldest, s.newest) for group in chosen for s in group.samples)
            staleness = StalenessStats()
            for (oldest, newest), samples in ages.items():
                assert oldest is not None
                staleness.add(oldest, newest, self.version, samples)
            again = [group for group in chosen if group.steps]
            batch = StoredBatch(self.next_step, groups, staleness, now, again)
            self.formed[batch.step] = batch
            self.archive.form(batch)
        return self.leased

    def preview(self) -> list[Group] | None:
        """What the batch after the leased one would be now; None while that cannot be told.

        It is judged by the version at which it will be trained. Where groups are replayed the
        commit adds to what there is to choose from, so nothing can be told before.
        """
        if self.leased is None or self.replays.enabled:
            return None
        if formed := self.formed.get(self.next_step + 1):
            return formed.all_groups
        return self._rules.choose(
            self._pool, self._policy, self.replays, self.next_step, to_come=True
        )

    def commit(self) -> StoredBatch:
        """The leased batch has been trained on: the version goes up, and old groups go.

        The sweep is done here and at every answer, not when a batch is formed: staleness changes at
        no other time, and what has to be replaced is replaced sooner.
        """
        batch = self.formed.pop(self.next_step)
        self.archive.close(batch)
        keep = self.archive.is_kept or self.replays.enabled
        self._pool.finish_training(batch.groups, batch.step, keep=keep)
        self._pool.ledger.replayed += sum(len(group.samples) for group in batch.replays)
        self.replays.used(batch.all_groups, batch.step)
        self.version = batch.step
        self.newest = max(self.newest, self.version)
        self.trained.merge(batch.staleness)
        self.last = batch.staleness
        self._sweep()
        self._retire()
        return batch

    def reject(self, faults: Mapping[str, str]) -> list[str]:
        """The trainer cannot use these samples of the leased batch, which is formed anew then.

        The samples that were in it; the others' groups are where they were before.
        """
        batch = self.leased
        found = [name for name in batch.sample_ids if name in faults] if batch else []
        if not found:
            return []
        # What comes after it may have groups that are trained on for the first time in it.
        undone = sorted(self.formed) if self.replays.enabled else [self.next_step]
        groups: list[Group] = []
        again: dict[str, Group] = {}
        for step in undone:
            batch = self.formed.pop(step)
            self.archive.forget(step)
            groups += batch.groups
            again |= {group.group_id: group for group in batch.replays}
        self._pool.stop_training(groups)
        bad = set(found)
        for group in groups:
            for sample in [s for s in group.samples if s.sample_id in bad]:
                if sample.state is State.READY:  # else it ended with another of its group
                    self._pool.reject(sample)
        for group in again.values():
            if any(sample.sample_id in bad for sample in group.samples):
                self.replays.give_up(group)
                if not self.archive.needs(group):
                    for sample in group.samples:
                        self._pool.trajectory_store.drop(sample.sample_id)
        return found

    def can_rewind(self, step: int) -> bool:
        """Whether the batches from `step` to the version are all kept."""
        steps = self.archive.steps
        return bool(steps) and steps[0] <= step <= self.version == steps[-1]

    def rewind(self, step: int, now: float) -> None:
        """The trainer has lost its steps from `step` on: their batches are to be trained on again.

        `can_rewind` must hold. What was formed since then waits for its turn.
        """
        alive: dict[str, Group] = {}
        for lost in range(step, self.version + 1):
            batch = self.archive.reopen(lost, now, alive)
            self.formed[lost] = batch
            alive |= {group.group_id: group for group in batch.all_groups}
            self._pool.reopen_training(batch.groups)
            self._pool.ledger.replayed -= sum(len(group.samples) for group in batch.replays)
            self.trained.remove(batch.staleness)
        for group in alive.values():
            self.replays.take_up(group, step)
        self.version = step - 1

    def restore(
        self, live: dict[str, Group], trajectories: Mapping[str, int], now: float
    ) -> list[str]:
        """Read back the batches, those to come of `live` groups; what a repair has taken of them.

        Args:
            live: by id; those that turn out to be trained already are taken out.
            trajectories: samples that there is one of, and in how many stages each is scored.
        """
        mended = self.replays.load(trajectories)
        batches, more = self.archive.load(live, trajectories, now)
        self.formed = {batch.step: batch for batch in batches}
        while self.archive.steps and self.version < self.archive.steps[-1]:
            self.version += 1  # the newest counts were lost with a damaged part of the store
            self.newest = max(self.newest, self.version)
            self._pool.ledger.trained += self.archive.count_new(self.version)
            more.append(f"step {self.version} is committed, though the counts of it are gone")
        return mended + more

    def cover(self, step: int) -> None:
        """The trainer has saved a checkpoint after `step`: earlier batches need not be kept."""
        self.checkpoint = max(step, self.checkpoint or 0)
        self.archive.drop_through(self.checkpoint)

    def cancel(self) -> None:
        """The formed batches will not be trained on: the run is over."""
        for step, batch in self.formed.items():
            self.archive.forget(step)
            for group in batch.groups:
                self._pool.end(group, "cancelled")
        self.formed.clear()

    def drop_stale(self, sample: Sample) -> None:
        """`sample` is too old to be trained on: by policy its group ends, or it starts anew."""
        if self._restart_stale:
            self._pool.counters["stale_restarts"] += 1
            self._pool.again(sample)
        else:
            self._pool.end(sample.group, "stale")

    def waits_for(self) -> list[Group]:
        """Groups that the next batch has to wait for, because they would be stale after it."""
        if not self._rules.wait:
            return []
        late = self._rules.last_chance(self._pool, self._policy, self.version)
        return [group for group in late if not group.completed]

    def _retire(self) -> None:
        """Let go of the groups that no batch can take once more."""
        if not self.replays.enabled:
            return
        formed = {group.group_id for batch in self.formed.values() for group in batch.replays}
        for group in self.replays.retire(self.version, formed):
            if not self.archive.needs(group):
                for sample in group.samples:
                    self._pool.trajectory_store.drop(sample.sample_id)

    def _sweep(self) -> None:
        """Drop what has become too old; partials are judged when leased again."""
        if self.version <= self._policy.bound:
            return  # not even version 0 is
        for group in list(self._pool.groups.values()):
            for sample in list(group.samples):
                if (
                    sample.state in (State.SCORING, State.READY)
                    and sample.oldest is not None
                    and self._policy.is_stale(sample.oldest, self.version)
                ):
                    self.drop_stale(sample)
