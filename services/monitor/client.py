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
NEEDED: tuple[m.Role, ...] = ("trainer", "weight_hub", "part")  # the run stands still without them


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

    def pause(self, reason: str, timeout_s: float) -> None:
        self._ask(m.Operate(kind="pause", reason=reason), m.Ok, timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._ask(m.Operate(kind="resume"), m.Ok, timeout_s)

    def checkpoint(self, timeout_s: float) -> int:
        """Have the trainer save its state; after which step that was.

        Raises:
            DeadlineError: that was not done within `timeout_s` seconds.
            RejectedError: the run is ending.
        """
        return self._ask(m.Operate(kind="checkpoint"), m.Ok, timeout_s).version

    def drain(self, member: str, reason: str, timeout_s: float) -> None:
        """Have `member` leave, or if it is empty, end the run in order.

        Raises:
            UsageError: there is no such member, or the run needs it.
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        try:
            self._ask(m.Operate(kind="drain", member=member, reason=reason), m.Ok, timeout_s)
        except RejectedError as error:
            if error.code == "not_drainable":
                raise UsageError(str(error)) from error
            raise

    def drain_node(self, node: str, reason: str, timeout_s: float) -> list[str]:
        """Have all members on the host called `node` leave; their names, relays last.

        Raises:
            UsageError: nobody is there, or one without whom the run cannot go on.
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        members = self.status(timeout_s).members
        there = [member for member in members if _same_host(member.host, node)]
        if not there:
            hosts = ", ".join(sorted({member.host for member in members})) or "no host"
            raise UsageError(f"--node {node}: no member of the run is there, but on {hosts}")
        for member in there:
            if member.role in NEEDED:
                raise UsageError(
                    f"--node {node}: {member.name} is there, without which the run cannot go on: "
                    "drain the run as a whole, or the other members by name"
                )
        leaving = sorted(there, key=lambda member: member.role == "relay")
        for member in leaving:
            self.drain(member.name, reason, timeout_s)
        return [member.name for member in leaving]

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


def _same_host(host: str, node: str) -> bool:
    """Return whether they are one name; Kubernetes' host names have dashes for dots."""
    return host.replace(".", "-") == node.replace(".", "-")
