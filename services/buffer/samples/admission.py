"""What a generator may have: queued samples first, then new groups as far as the rules let it."""

from __future__ import annotations

import logging
from collections import Counter

from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.batches import Batches
from umbra.services.buffer.samples.groups import Sample
from umbra.services.buffer.samples.leases import Grant
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessPolicy
from umbra.services.config import BufferConfig

log = logging.getLogger(__name__)


class Admission:
    """Leases samples to generators by the admission, lease and partial rules of `staleness`.

    Groups are issued only when a generator asks and nothing is queued, so the batch that a group
    counts for is decided by what is under way.
    """

    def __init__(
        self,
        pool: SamplePool,
        batches: Batches,
        policy: StalenessPolicy,
        prompts: PromptFeed,
        config: BufferConfig,
        counters: Counter[str],
    ) -> None:
        self._pool = pool
        self._batches = batches
        self._policy = policy
        self._prompts = prompts
        self._config = config
        self._counters = counters

    @property
    def available(self) -> int:
        """Samples that could be leased now to a generator with the newest weights."""
        return self._pool.ledger.count("queued") + max(self._room, 0) * self._config.group_size

    @property
    def _room(self) -> int:
        """Groups that may be issued."""
        if self._pool.blocked:
            return 0
        return self._policy.room(self._batches.untrained, self._batches.version)

    def take(self, grant: Grant, waiting: int) -> None:
        """Lease samples to a generator.

        `waiting` other generators want work too: each gets an equal share, so that the first to ask
        does not leave the others idle.
        """
        most = grant.capacity
        if waiting:
            most = min(most, len(grant.tasks) - (-self.available // (1 + waiting)))
        while len(grant.tasks) < most and grant.room > 0:
            sample = self._next(grant.version)
            if sample is None:
                break
            if sample.oldest is not None:
                if sample.oldest < self.required_version(sample):
                    self._pool.drop_partial(sample)
                    self._counters["partials_too_old"] += 1
                else:
                    self._counters["partials_continued"] += 1
            self._pool.lease(sample, grant)

    def _next(self, version: int) -> Sample | None:
        sample = self._pool.next_queued()
        if sample is None:
            if self._room <= 0:
                return None
            due = self._policy.due_version(self._batches.untrained, self._batches.version)
            if version < self._policy.required_version(due, self._batches.version):
                return None
            sample = self._pool.issue(next(self._prompts), due).samples[0]
        return sample if version >= self.required_version(sample) else None

    def required_version(self, sample: Sample) -> int:
        """Oldest weights that may generate `sample` now."""
        return self._policy.required_version(sample.group.due, self._batches.version)
