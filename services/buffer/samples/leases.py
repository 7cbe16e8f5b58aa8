"""What a generator may have: queued samples first, then new groups as far as the rules let it."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.messages import Interrupt, Interrupted, InterruptRequest
from umbra.proto.net.server import Request
from umbra.proto.records import SampleTask
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.members import Membership
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.batches import Batches
from umbra.services.buffer.samples.groups import Sample
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessPolicy
from umbra.services.config import BufferConfig

log = logging.getLogger(__name__)


class Leases:
    """Hands out samples by the admission, lease and partial rules of `staleness`.

    Groups are issued only when a generator asks and nothing is queued, so the batch that a group
    counts for is decided by what is really under way.
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

    def take(
        self, holder: str, *, version: int, capacity: int, waiting: int, now: float
    ) -> list[SampleTask]:
        """Up to `capacity` samples for `holder`, which serves `version`.

        `waiting` other generators want work too: each gets an equal share of what there is, so that
        the first to ask does not leave the others idle. Who has room left asks again.
        """
        most = min(capacity, -(-self.available // (1 + waiting))) if waiting else capacity
        tasks: list[SampleTask] = []
        while len(tasks) < most:
            sample = self._next(version)
            if sample is None:
                break
            if sample.oldest is not None:
                limit = self._limit(sample, now)
                if limit and self._config.partial_policy == "drop":
                    self._counters[limit] += 1
                    self._pool.end(sample.group, "stale")
                    continue
                if limit:
                    self._pool.drop_partial(sample)
                self._counters[limit or "partials_continued"] += 1
            tasks.append(self._pool.lease(sample, holder, version, now))
        return tasks

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

    def _limit(self, sample: Sample, now: float) -> str:
        """Which limit the partial of `sample` is past, as the name of a counter; empty if none."""
        config, oldest = self._config, sample.oldest
        if oldest is not None and oldest < self.required_version(sample):
            return "partials_too_old"
        if 0 < config.partial_max_segments <= sample.segments:
            return "partials_of_too_many_segments"
        if 0 < config.partial_max_age_s <= now - sample.begun_at:
            return "partials_too_long_under_way"
        return ""

    def required_version(self, sample: Sample) -> int:
        """Oldest weights that may generate `sample` now."""
        return self._policy.required_version(sample.group.due, self._batches.version)


class Cancellations:
    """Asks generators to hand samples back. A push that is lost costs nothing but the time saved.

    Args:
        interrupt: samples under way come back as partials when a batch is full.
    """

    def __init__(
        self,
        pool: SamplePool,
        members: Membership,
        *,
        interrupt: bool,
        counters: Counter[str],
        outbox: Effects,
    ) -> None:
        self._pool = pool
        self._members = members
        self._interrupts = interrupt
        self._counters = counters
        self._outbox = outbox

    def requested(self, request: Request, body: InterruptRequest) -> None:
        """Somebody asks for it by hand."""
        reason = body.reason or "on request"
        count = self.interrupt(self._under_way(body.samples), reason, turn_end=True)
        self._outbox.reply(request, Interrupted(samples=count))

    def batch_formed(self) -> None:
        """Have the samples still under way handed back, if the run interrupts on full batches."""
        if self._interrupts:
            self.interrupt(self._under_way(), "the batch is full", turn_end=True)

    def _under_way(self, sample_ids: Collection[str] = ()) -> list[Sample]:
        return [
            sample
            for held in self._pool.held.values()
            for sample in held.values()
            if not sample_ids or sample.sample_id in sample_ids
        ]

    def interrupt(self, samples: Sequence[Sample], reason: str, *, turn_end: bool = False) -> int:
        """Ask the holders of these samples to hand them back; how many they are.

        With `turn_end`, once their environment has answered the turn under way.
        """
        leases: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for sample in samples:
            leases[sample.holder].append((sample.sample_id, sample.attempt))
        for holder, held in leases.items():
            if holder in self._members.peers:
                identity = self._members.peers[holder].identity
                for portion in portions(held, lambda _: 0, LEASES):
                    order = Interrupt(leases=portion, reason=reason, turn_end=turn_end)
                    self._outbox.push(identity, order, "data")
        self._counters["interrupted"] += len(samples)
        return len(samples)
