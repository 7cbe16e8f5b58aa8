"""Ends a relay with its run: a relay is no member, so nobody tells it."""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import Future
from types import TracebackType

from umbra.proto.errors import PeerLostError
from umbra.proto.messages import Message, Ping, Pong
from umbra.services.runtime.keys import OPEN, Security
from umbra.services.runtime.link import Link

PERIOD_S = 1.0
OVER = ("draining", "stopped", "failed")

log = logging.getLogger(__name__)


class RunWatch:
    """Asks the buffer every second how the run is; a context manager.

    Args:
        name: of the relay.
        broker: address of the buffer.
        grace_s: seconds that it may be silent.
        stopping: set when the run is over, or its buffer is lost.
        security: keys of the relay.
    """

    def __init__(
        self,
        name: str,
        broker: str,
        grace_s: float,
        stopping: threading.Event,
        security: Security = OPEN,
    ) -> None:
        self.failure: PeerLostError | None = None
        self._broker = broker
        self._grace_s = grace_s
        self._stopping = stopping
        self._link = Link(f"{name}-watch", uuid.uuid4().hex[:12], security=security)
        self._heard_at = self._link.clock()
        self._channel = self._link.channel(broker, "broker")
        self._link.every(PERIOD_S, self._ask)

    def __enter__(self) -> RunWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()

    def _ask(self) -> None:
        if self._stopping.is_set():
            return
        if self._link.clock() - self._heard_at > self._grace_s:
            self.failure = PeerLostError(
                f"the buffer at {self._broker} is silent for {self._grace_s:g} s"
            )
            self._stopping.set()
            return
        self._channel.request(Ping(), timeout_s=self._grace_s, on_done=self._answered)

    def _answered(self, future: Future[Message]) -> None:
        if future.exception() is None and isinstance(pong := future.result(), Pong):
            self._heard_at = self._link.clock()
            if pong.state in OVER and not self._stopping.is_set():
                log.info("the run is over: the buffer is %s", pong.state)
                self._stopping.set()
