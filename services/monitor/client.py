"""Talks to a run's buffer without joining the run: looking changes nothing, and asking may."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

import zmq

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.sockets import check_address

M = TypeVar("M", bound=m.Message)


class StatusClient:
    """A connection to the buffer at `broker`; a context manager.

    Each call raises DeadlineError if nobody answers within `timeout_s` seconds.

    A hub, and a relay, can be asked for a sign of life too: `server` is its role then.

    Raises:
        UsageError: `broker` is no address.
    """

    def __init__(
        self, broker: str, security: Security = OPEN, *, server: m.Role = "buffer"
    ) -> None:
        check_address(broker, "--broker" if server == "buffer" else "--hub")
        self.broker = broker
        incarnation = uuid.uuid4().hex[:12]
        self._link = IoThread(f"monitor-{incarnation}", incarnation, security=security)
        self._channel = self._link.channel(broker, server.replace("_", " "), server=server)
        # Nothing that we send is worth waiting for at the end.
        self._link.run(lambda: self._channel.socket.set(zmq.LINGER, 0))

    def status(self, timeout_s: float) -> m.Status:
        return self._ask(m.StatusRequest(), m.Status, timeout_s)

    def ping(self, timeout_s: float) -> m.Pong:
        return self._ask(m.Ping(), m.Pong, timeout_s)

    def operate(
        self, kind: m.Operation, timeout_s: float, *, member: str = "", reason: str = ""
    ) -> m.Ok:
        """Operate the run; a checkpoint's answer says after which step it is.

        Raises:
            UsageError: there is no such `member`, or the run needs it.
            RejectedError: the run is ending.
        """
        try:
            return self._ask(m.Operate(kind=kind, member=member, reason=reason), m.Ok, timeout_s)
        except RejectedError as error:
            if error.code == "not_drainable":
                raise UsageError(str(error)) from error
            raise

    def subscribe(self, endpoint: str, on_event: Callable[[m.Header, m.Event], None]) -> None:
        """Watch telemetry; `on_event` runs on another thread, and must be quick."""
        self._link.subscribe(endpoint, on_event)

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _ask(self, body: m.Message, reply: type[M], timeout_s: float) -> M:
        try:
            return self._channel.call(body, reply, timeout_s=timeout_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"no buffer answers at {self.broker} within {timeout_s:g} s: check --broker, and "
                "that the run is still up"
            ) from error
