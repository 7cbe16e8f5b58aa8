"""Which complete groups make a batch, and whether one can be made yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from umbra.services.buffer.policy.replays import Replays
from umbra.services.buffer.policy.staleness import StalenessPolicy
from umbra.services.buffer.samples.groups import Group
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.config import BufferConfig


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How a batch is put together. See the keys of `[buffer]` of the same names."""

    groups: int
    tokens: int = 0
    freshest: bool = False
    times: int = 1  # batches that a group may be in
    wait: bool = False  # stale_policy = wait

    @classmethod
    def of(cls, config: BufferConfig) -> BatchRules:
        """The rules that a configuration asks for."""
        return cls(
            groups=config.batch_groups,
            tokens=config.batch_tokens,
            freshest=config.sampling == "freshest",
            times=config.replay_times if config.sampling == "replay" else 1,
            wait=config.stale_policy == "wait",
        )

    def choose(
        self,
        pool: SamplePool,
        policy: StalenessPolicy,
        replays: Replays,
        version: int,
        *,
        to_come: bool = False,
    ) -> list[Group] | None:
        """The groups of the batch that is trained at `version`; None while it is not full.

        If `version` is still `to_come`, what will be too old for it is left out: the sweep, which
        keeps the pool free of it otherwise, comes with the version. Groups that were trained on
        before come last. They make up for new ones that are missing as long as one group in
        `times` is new: that is what keeps every group in use `times` times.
        """
        if not self.tokens and len(pool.complete) * self.times < self.groups:
            return None  # asked at every event, so it must be cheap
        last_chance = self.last_chance(pool, policy, version) if self.wait else []
        if any(not group.completed for group in last_chance):
            return None  # so must this: a full batch may wait for long
        complete = list(pool.complete.values())
        if to_come:
            complete = [g for g in complete if not policy.is_stale(g.oldest or 0, version)]
        again: list[Group] = []
        if not self._fill(complete):
            again = replays.candidates(version) if self.times > 1 and complete else []
            chosen = self._fill([*complete, *again])
            if not chosen or len(complete) * self.times < len(chosen):
                return None
        if self.freshest:
            complete.sort(key=lambda group: -(group.oldest or 0))  # stable: else by completion
        if self.wait:
            names = {group.group_id for group in last_chance}
            complete.sort(key=lambda group: group.group_id not in names)
        return self._fill([*complete, *again])

    def last_chance(self, pool: SamplePool, policy: StalenessPolicy, version: int) -> list[Group]:
        """Groups that would be stale after this batch, as many as one batch can take.

        Asked under the rule `wait` alone: the pool knows ages then.
        """
        assert pool.ages is not None
        return pool.ages.first(self.groups, lambda age: policy.is_stale(age, version + 1))

    def _fill(self, groups: Sequence[Group]) -> list[Group] | None:
        """The first of `groups` that fill a batch; None if all of them don't."""
        if not self.tokens:
            return list(groups[: self.groups]) if len(groups) >= self.groups else None
        tokens = 0
        for count, group in enumerate(groups, start=1):
            tokens += sum(sample.tokens for sample in group.samples)
            if count == self.groups or self.tokens <= tokens:
                return list(groups[:count])
        return None
