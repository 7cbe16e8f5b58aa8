"""The gate of a binding process: who may connect to which socket, and who was sent away.

libzmq asks about each peer that has shown a key (ZAP, RFC 27) and takes the answer's user id, here
the role of the key, into the metadata of all that comes over this connection. So a message's role
is a property of its connection, whatever its header says. Peers that get no further than the
handshake are known by the events of the sockets.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.access import KEY_ROLES, KeyRole, may_connect
from umbra.proto.bounds import NAME_CHARS, one_line
from umbra.proto.net.keys import Keys

USER_ID = "User-Id"
BURST = 256  # decisions before the messages of those who are in get their turn
NAMED = 64  # refusals told apart; there is no end to what strangers may try
OTHERS = "others"
# What fails before there is anything to ask about; what we refuse ourselves is known already.
UNASKED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

log = logging.getLogger(__name__)


class Refusals:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, what: str) -> None:
        """Count one; it is logged the 1st, 2nd, 4th, ... time, so that nobody can fill a disk."""
        what = one_line(what, NAME_CHARS)  # as a key of `Status.refused`
        key = what if what in self.counts or len(self.counts) < NAMED else OTHERS
        self.counts[key] += 1
        count = self.counts[key]
        if not count & (count - 1):
            log.warning("refused %s (%d so far)", what, count)


class AllowList:
    """Answers ZAP requests: frames in, frames out; `refusals` counts those not let in."""

    def __init__(self, keys: Keys, refusals: Refusals) -> None:
        self._roles: Mapping[bytes, KeyRole] = {
            z85.decode(public): role for role, public in keys.roles.items()
        }
        self._refusals = refusals

    def answer(self, frames: Sequence[bytes]) -> list[bytes]:
        """The reply to one request; anything that is not a known key of the right role gets no."""
        number = frames[1] if len(frames) > 1 else b""
        role = None
        if len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
            role = self._roles.get(frames[6])
            socket, address = frames[2].decode(), frames[3].decode(errors="replace")
            if role is None:
                self._refusals.add(f"an unknown key from {address} on {socket}")
            elif not may_connect(role, socket):
                self._refusals.add(f"the {role} key from {address} on {socket}")
                role = None
        if role is None:
            return [b"1.0", number, b"400", b"this key does not open this socket", b"", b""]
        return [b"1.0", number, b"200", b"OK", role.encode(), b""]


class ZapGate:
    """The allow-list and the handshakes of the bound sockets of `context`, its only gate."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, refusals: Refusals
    ) -> None:
        self._context = context
        self._allowed = AllowList(keys, refusals)
        self._refusals = refusals
        self._zap = sockets.allow_list(context)
        self._watched: dict[zmq.Socket[bytes], tuple[str, zmq.Socket[bytes]]] = {}

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled; what comes is for `serve`."""
        return [self._zap, *self._watched]

    def watch(self, socket: zmq.Socket[bytes], name: str) -> None:
        self._watched[sockets.handshakes(self._context, socket, UNASKED)] = (name, socket)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Handle what has come on one of `sockets`."""
        for _ in range(BURST):
            try:
                if socket is self._zap:
                    asked = socket.recv_multipart(zmq.NOBLOCK)
                    socket.send_multipart(self._allowed.answer(asked))
                else:
                    name, _ = self._watched[socket]
                    self._failed(recv_monitor_message(socket, zmq.NOBLOCK), name)
            except zmq.Again:
                return

    def close(self) -> None:
        """Close its own sockets; those it watches must still be open."""
        for monitor, (_, socket) in self._watched.items():
            socket.disable_monitor()
            monitor.close(linger=0)
        self._watched.clear()
        self._zap.close(linger=0)

    def _failed(self, event: Mapping[str, Any], name: str) -> None:
        match event["value"]:
            case zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                what = "a connection without keys"
            case zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                what = "a connection with keys of another run"
            case _:
                what = "a broken handshake"
        self._refusals.add(f"{what} on {name}")


def role_of(frame: zmq.Frame) -> KeyRole | None:
    """The role of the connection that `frame` came over; None where there are no keys."""
    try:
        role = cast(str, frame.get(USER_ID))
    except zmq.ZMQError:
        return None
    return role if role in KEY_ROLES else None
