"""What the broker wants done: messages to send and rows to write, in order."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from umbra.proto.messages import Message
from umbra.proto.net.server import Request


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Answer `request`, whose body is not needed for that."""

    request: Request
    body: Message


class Notify(msgspec.Struct, frozen=True, gc=False):
    """Send `body` unasked to the socket `identity` of a channel."""

    identity: bytes
    body: Message
    channel: str = "control"


class Measure(msgspec.Struct, frozen=True):
    """A row for the metrics file."""

    kind: str
    fields: dict[str, Any]


Effect: TypeAlias = Reply | Notify | Measure


class Effects:
    """Collects the effects of one event."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def reply(self, request: Request, body: Message) -> None:
        """Answer `request` with `body`."""
        self._effects.append(Reply(request.bare, body))

    def push(self, identity: bytes, body: Message, channel: str = "control") -> None:
        """Send `body` unasked."""
        self._effects.append(Notify(identity, body, channel))

    def measure(self, kind: str, **fields: Any) -> None:
        """Write a row of metrics."""
        self._effects.append(Measure(kind, fields))

    def take(self) -> list[Effect]:
        """All effects since the last call."""
        effects, self._effects = self._effects, []
        return effects
