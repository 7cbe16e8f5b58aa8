"""Bounded disk use: what is done when the store is as large as it may be, or the disk is full."""

from __future__ import annotations

import logging

from umbra.proto.messages import Stuck
from umbra.services.buffer.policy.batches import Batches
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.store.api import Store

log = logging.getLogger(__name__)


class DiskQuota:
    """Stops the issue of new groups while there is no room for them.

    What is under way goes on, so that the trainer can commit and save the checkpoint that lets old
    batches go. A trainer that has never saved one could not use them, so they go right away.

    Args:
        max_bytes: `buffer.store_max_bytes`.
    """

    def __init__(self, store: Store, pool: SamplePool, batches: Batches, max_bytes: int) -> None:
        self._store = store
        self._pool = pool
        self._batches = batches
        self._max_bytes = max_bytes
        self._disk = ""  # what the disk said, while it is full
        self._since: float | None = None

    def full(self, reason: str) -> None:
        """The disk is full, by the words of the store; empty once it is not."""
        self._disk = reason

    def check(self, now: float) -> None:
        """Look whether there is room."""
        needed = self._store.size_bytes
        steps, counters = self._batches.archive.steps, self._pool.counters
        reason = self._disk
        if needed >= self._max_bytes and self._batches.checkpoint is None and steps:
            if not counters["batches_let_go"]:
                log.warning(
                    "buffer.store_max_bytes = %d is reached and the trainer saves no checkpoints: "
                    "its first batches go, so it could not start from the beginning again",
                    self._max_bytes,
                )
            counters["batches_let_go"] += 1
            self._batches.archive.drop_through(steps[0])  # the next one with the next poll
        elif needed >= self._max_bytes and not reason:
            reason = (
                f"the store may need {needed} bytes and buffer.store_max_bytes is "
                f"{self._max_bytes}: allow more, or save checkpoints more often"
            )
        self._block(reason, now)

    def stuck(self, now: float) -> list[Stuck]:
        """What is held up by it."""
        if self._since is None:
            return []
        return [
            Stuck(
                what=f"new groups: {self._pool.blocked}",
                holder="buffer",
                age_s=now - self._since,
                action="none are issued until there is room; what is under way goes on",
            )
        ]

    def _block(self, reason: str, now: float) -> None:
        if reason and not self._pool.blocked:
            log.warning("no new groups: %s", reason)
            self._pool.counters["store_full"] += 1
            self._since = now
        elif self._pool.blocked and not reason:
            log.info("there is room in the store again")
            self._since = None
            self._pool.openings += 1
        self._pool.blocked = reason
