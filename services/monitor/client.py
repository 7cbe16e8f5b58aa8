"""Asks a run's buffer how things are, without joining the run: looking changes nothing."""

from __future__ import annotations

import re
import uuid
from types import TracebackType

import zmq

from umbra.proto.errors import DeadlineError, UsageError
from umbra.proto.messages import (
    Interrupted,
    InterruptRequest,
    Ping,
    Pong,
    Role,
    Status,
    StatusRequest,
)
from umbra.services.runtime.keys import OPEN, Security
from umbra.services.runtime.link import Link

ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})|ipc://.+")


class StatusClient:
    """A connection to the buffer at `broker`; a context manager.

    A hub, and a relay, can be asked for a sign of life too: then `server` is "weight_hub".

    Raises:
        UsageError: `broker` is no address.
    """

    def __init__(self, broker: str, security: Security = OPEN, *, server: Role = "buffer") -> None:
        if not ADDRESS.fullmatch(broker):
            flag = "--broker" if server == "buffer" else "--hub"
            raise UsageError(f"{flag} {broker}: write it as tcp://host:port")
        self.broker = broker
        incarnation = uuid.uuid4().hex[:12]
        self._link = Link(f"monitor-{incarnation}", incarnation, security=security)
        self._channel = self._link.channel(broker, server.replace("_", " "), server=server)
        # Nothing that we send is worth waiting for at the end.
        self._link.run(lambda: self._channel.socket.set(zmq.LINGER, 0))

    def status(self, timeout_s: float) -> Status:
        """The whole state of the run.

        Raises:
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        try:
            return self._channel.call(StatusRequest(), Status, timeout_s=timeout_s)
        except DeadlineError as error:
            raise self._unreachable(timeout_s) from error

    def ping(self, timeout_s: float) -> Pong:
        """A sign of life.

        Raises:
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        try:
            return self._channel.call(Ping(), Pong, timeout_s=timeout_s)
        except DeadlineError as error:
            raise self._unreachable(timeout_s) from error

    def interrupt(self, samples: list[str], timeout_s: float) -> int:
        """Have `samples` (empty: all) handed back by their generators; how many that are.

        Raises:
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        body = InterruptRequest(samples=samples, reason="on request")
        try:
            return self._channel.call(body, Interrupted, timeout_s=timeout_s).samples
        except DeadlineError as error:
            raise self._unreachable(timeout_s) from error

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _unreachable(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"no buffer answers at {self.broker} within {timeout_s:g} s: check --broker, and that "
            "the run is still up"
        )
