"""The next batch, fetched and made into tensors while the trainer is busy with the current one.

It is a copy of what the batch will be, by which the buffer has bound itself to nothing: when its
turn comes it is asked for like any other, by all rules that hold then, and is not sent again if it
is still the same. So data that was prefetched is never older than the bound allows, and a trainer
that dies leaves nothing behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from umbra.proto.errors import UmbraError
from umbra.proto.messages import BatchLease, PeekBatch
from umbra.proto.net.channel import Channel
from umbra.proto.records import Trajectory
from umbra.services.trainer.batch import TrainBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What came of a look at the next batch."""

    step: int
    digest: str  # shows the buffer what we hold
    batch: TrainBatch


class Prefetch:
    """Looks at one batch at a time, in a thread of its own.

    Args:
        channel: to the buffer.
        make: a batch of trajectories.
        wait_s: how long the buffer may take to have one.
        grace_s: how much later its answer may come.
    """

    def __init__(
        self,
        channel: Channel,
        make: Callable[[list[Trajectory]], TrainBatch],
        *,
        wait_s: float,
        grace_s: float,
    ) -> None:
        self._channel = channel
        self._make = make
        self._wait_s = wait_s
        self._grace_s = grace_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-prefetch")
        self._coming: Future[Ahead | None] | None = None
        self._arrived = threading.Event()
        self._enough = threading.Event()

    def begin(self, step: int) -> None:
        """Fetch what the batch of `step` will be; the one before has just been leased."""
        self._arrived, self._enough = threading.Event(), threading.Event()
        self._coming = self._thread.submit(self._fetch, step, self._arrived, self._enough)

    def take(self, step: int) -> Ahead | None:
        """What has come of `step`; None if nothing has: the question is withdrawn then."""
        coming, self._coming = self._coming, None
        self._enough.set()
        if coming is None or not (coming.done() or self._arrived.is_set()):
            return None
        ahead = coming.result()
        return ahead if ahead is not None and ahead.step == step else None

    def close(self) -> None:
        self._enough.set()
        self._thread.shutdown()

    def _fetch(self, step: int, arrived: threading.Event, enough: threading.Event) -> Ahead | None:
        """In the thread. Whatever goes wrong is left to the request that counts."""
        ask = PeekBatch(step=step, wait_s=self._wait_s)
        limit_s = self._wait_s + self._grace_s
        try:
            if enough.is_set():
                return None
            lease = self._channel.call(ask, BatchLease, timeout_s=limit_s, stopping=enough)
            if not lease.trajectories:
                return None
            arrived.set()
            return Ahead(step, lease.digest, self._make(lease.scored()))
        except UmbraError as error:
            log.debug("batch %d is not prefetched: %s", step, error)
            return None
