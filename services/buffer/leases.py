"""What a generator may have: queued samples first, then new groups as far as the rules let it."""

from __future__ import annotations

from collections import Counter

from umbra.proto.records import SampleTask
from umbra.services.buffer.batches import Batches
from umbra.services.buffer.prompts import PromptStream
from umbra.services.buffer.samples import Pool, Sample
from umbra.services.buffer.staleness import StalenessPolicy


class Leases:
    """Hands out samples by the admission, lease and partial rules of `staleness`.

    Groups are issued only when a generator asks and nothing is queued, so the batch that a group
    counts for is decided by what is really under way.
    """

    def __init__(
        self,
        pool: Pool,
        batches: Batches,
        policy: StalenessPolicy,
        prompts: PromptStream,
        counters: Counter[str],
    ) -> None:
        self._pool = pool
        self._batches = batches
        self._policy = policy
        self._prompts = prompts
        self._counters = counters

    @property
    def available(self) -> int:
        """Samples that could be leased now to a generator with the newest weights."""
        ledger = self._pool.ledger
        if self._pool.blocked:
            return ledger.count("queued")
        room = self._policy.room(ledger.live, self._batches.version)
        return ledger.count("queued") + max(room, 0)

    def take(
        self, holder: str, *, version: int, capacity: int, waiting: int, now: float
    ) -> list[SampleTask]:
        """Up to `capacity` samples for `holder`, which serves `version`.

        `waiting` other generators want work too: each gets an equal share of what there is, so that
        the first to ask does not leave the others idle. Who has room left asks again.
        """
        share = -(-self.available // (1 + waiting))
        tasks: list[SampleTask] = []
        while len(tasks) < min(capacity, share):
            sample = self._next(version)
            if sample is None:
                break
            if sample.oldest is not None and sample.oldest < self.required_version(sample):
                self._pool.drop_partial(sample)
                self._counters["partials_too_old"] += 1
            elif sample.oldest is not None:
                self._counters["partials_continued"] += 1
            tasks.append(self._pool.lease(sample, holder, now))
        return tasks

    def _next(self, version: int) -> Sample | None:
        sample = self._pool.next_queued()
        if sample is None:
            live = self._pool.ledger.live
            if self._pool.blocked or self._policy.room(live, self._batches.version) <= 0:
                return None
            index = self._policy.batch_index(live)
            if version < self._policy.required_version(index, self._batches.version):
                return None
            sample = self._pool.issue(next(self._prompts), index).samples[0]
        return sample if version >= self.required_version(sample) else None

    def required_version(self, sample: Sample) -> int:
        """Oldest weights that may generate `sample` now."""
        return self._policy.required_version(sample.group.batch_index, self._batches.version)
