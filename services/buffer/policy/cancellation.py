"""Generation is stopped where it is not needed now: on request, or because a batch is full."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.messages import Interrupt, Interrupted, InterruptRequest
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.membership import Membership
from umbra.services.buffer.samples.groups import Sample
from umbra.services.buffer.samples.pool import SamplePool

log = logging.getLogger(__name__)


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
