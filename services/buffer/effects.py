"""The broker's effects, in order."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import msgspec

from umbra.proto.messages import Message, Nack
from umbra.proto.net.server import Request


class Reply(msgspec.Struct, frozen=True, gc=False):
    request: Request
    body: Message


class Notify(msgspec.Struct, frozen=True, gc=False):
    identity: bytes
    body: Message
    channel: str = "control"


class Measure(msgspec.Struct, frozen=True):
    kind: str
    fields: dict[str, Any]


Effect: TypeAlias = Reply | Notify | Measure


class NackError(Exception):
    """The request is refused; `path` names the field at fault."""

    def __init__(self, code: str, reason: str, path: str = "$") -> None:
        super().__init__(reason)
        self.code = code
        self.path = path


class Effects:
    """The effects of one event; `counters` count refusals by their code."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._effects: list[Effect] = []

    def reply(self, request: Request, body: Message) -> None:
        self._effects.append(Reply(request.bare, body))

    def refuse(self, request: Request, why: NackError) -> None:
        self._counters[why.code] += 1
        self.reply(request, Nack(code=why.code, reason=str(why), path=why.path))

    def push(self, identity: bytes, body: Message, channel: str = "control") -> None:
        self._effects.append(Notify(identity, body, channel))

    def measure(self, kind: str, **fields: Any) -> None:
        self._effects.append(Measure(kind, fields))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def departed(name: str) -> NackError:
    """Return the refusal of a waiting request of a member that has left or is given up.

    If it is alive, it joins again and asks again; without an answer its resends would count as
    resends of a request that still waits.
    """
    return NackError("not_member", f"{name!r} is not a member any more", "sender")
