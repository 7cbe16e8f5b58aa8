"""Batches of complete groups: formed once per step, leased to the trainer, ended by its commit."""

from __future__ import annotations

from dataclasses import dataclass

from umbra.proto.records import Trajectory
from umbra.services.buffer.samples import Group, Pool, State
from umbra.services.buffer.staleness import StalenessPolicy, StalenessStats


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one step; the trainer gets this very one however often it asks."""

    step: int
    groups: list[Group]
    trajectories: list[Trajectory]
    staleness: StalenessStats
    formed_at: float  # seconds of the broker's clock


class Batches:
    """The trainer's version and the batch under way.

    Args:
        pool: where the groups come from.
        policy: the staleness rules.
        batch_groups: groups per batch.
    """

    def __init__(self, pool: Pool, policy: StalenessPolicy, batch_groups: int) -> None:
        self.version = 0
        self.leased: Batch | None = None
        self.trained = StalenessStats()
        self.last = StalenessStats()  # of the newest committed batch
        self._pool = pool
        self._policy = policy
        self._batch_groups = batch_groups

    @property
    def next_step(self) -> int:
        """The only step whose batch may be leased."""
        return self.version + 1

    def form(self, now: float) -> Batch | None:
        """The batch of the next step, formed if there was none; None while groups are missing."""
        if self.leased is None and len(self._pool.complete) >= self._batch_groups:
            complete = iter(self._pool.complete.values())
            groups = [next(complete) for _ in range(self._batch_groups)]
            trajectories = self._pool.start_training(self.next_step, groups)
            staleness = StalenessStats()
            for trajectory in trajectories:
                staleness.add(trajectory, self.version)
            self.leased = Batch(self.next_step, groups, trajectories, staleness, now)
        return self.leased

    def commit(self) -> Batch:
        """The leased batch has been trained on: the version goes up, and old groups go.

        The sweep is done here and at every answer, not when a batch is formed: staleness changes at
        no other time, and what has to be replaced is replaced sooner.
        """
        assert self.leased is not None
        batch, self.leased = self.leased, None
        self._pool.finish_training(batch.step, batch.groups)
        self.version = batch.step
        self.trained.merge(batch.staleness)
        self.last = batch.staleness
        for group in list(self._pool.groups.values()):
            if self._is_doomed(group):
                self._pool.end(group, "stale")
        return batch

    def cancel(self) -> None:
        """The leased batch will not be trained on: the run is over."""
        if self.leased is not None:
            batch, self.leased = self.leased, None
            for group in batch.groups:
                self._pool.end(group, "cancelled")

    def _is_doomed(self, group: Group) -> bool:
        """Whether an answer of `group` is too old; partials are judged when leased again."""
        return group.ready > 0 and any(
            sample.state is State.READY
            and sample.oldest is not None
            and self._policy.is_stale(sample.oldest, self.version)
            for sample in group.samples
        )
