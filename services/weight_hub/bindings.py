"""Whose name is whose at the hub: a name belongs to the connection and key that it came with first.

As at the buffer: names and incarnations are known to all, the identity of its sockets only to a
process itself. A new incarnation may take its name over, with a key of the same role.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from umbra.proto.access import KeyRole
from umbra.proto.messages import Nack, PartState, RegisterManifest, Subscribe
from umbra.proto.net.server import Request

KEPT = 8192  # names, the last ones
BINDING = (RegisterManifest, PartState, Subscribe)  # what a process begins with


@dataclass(frozen=True, slots=True)
class _Owner:
    incarnation: str
    identity: bytes
    role: KeyRole | None


class Bindings:
    """Owners of the names at one hub."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def check(self, request: Request) -> Nack | None:
        """Why `request` may not be made in the name that it states; None if it may.

        The first of a process, and of a new incarnation of it, claims the name.
        """
        header = request.header
        owner = self._owners.get(header.sender)
        begins = isinstance(request.body, BINDING)
        known = owner is not None and owner.incarnation == header.incarnation
        if owner is not None:
            if owner.role != request.role or (known and owner.identity != request.identity):
                return _not_allowed(f"{header.sender!r} came over another connection")
            if not known and not begins:
                return _not_allowed(f"{header.sender!r} has not begun with this incarnation")
        if begins and not known:
            self._owners[header.sender] = _Owner(header.incarnation, request.identity, request.role)
        if header.sender in self._owners:
            self._owners.move_to_end(header.sender)
        if len(self._owners) > KEPT:
            self._owners.popitem(last=False)
        return None


def _not_allowed(reason: str) -> Nack:
    return Nack(code="not_allowed", reason=reason, path="sender")
