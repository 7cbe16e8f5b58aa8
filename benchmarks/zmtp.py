"""One end of ZeroMQ connections, over plain sockets: what a client sends is one call of the system.

ZMTP 3.0 with the mechanism NULL, as `https://rfc.zeromq.org/spec/23/` has it: a greeting, a READY,
then messages of frames. libzmq would add a thread and two wake-ups to every message; a client that
shall cost nothing beside the server that is measured writes the bytes itself. Frames of more than
`KEPT_BYTES` are read and thrown away.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

GREETING_BYTES = 64
KEPT_BYTES = 256 << 10
READ_BYTES = 256 << 10
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
CONNECT_S = 60.0


GREETING = (b"\xff" + bytes(7) + b"\1\x7f\3\0" + b"NULL").ljust(GREETING_BYTES, b"\0")


def ready(identity: bytes) -> bytes:
    """What a DEALER of this identity says after the greeting of the other end."""
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in properties
    )
    return bytes([COMMAND, len(body)]) + body


def packed(frames: Sequence[bytes]) -> bytes:
    """A message as it travels."""
    parts: list[bytes] = []
    left = len(frames)
    for frame in frames:
        left -= 1
        flags, size = (MORE if left else 0), len(frame)
        if size < 256:
            parts += (bytes((flags, size)), frame)
        else:
            parts += (bytes((flags | LONG,)) + size.to_bytes(8, "big"), frame)
    return b"".join(parts)


class Inbox:
    """Messages out of the bytes of a connection; a frame that is too large to keep comes empty."""

    def __init__(self) -> None:
        self._rest = b""
        self._unread = 0  # bytes of a frame that are to be thrown away
        self._flags = 0  # of that frame
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are whole with `data`."""
        messages: list[list[bytes]] = []
        if self._unread:
            if len(data) < self._unread:
                self._unread -= len(data)
                return messages
            data, self._unread = data[self._unread :], 0
            self._end(self._flags, b"", messages)
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        while at < end:
            flags = data[at]
            begin = at + (9 if flags & LONG else 2)
            if begin > end:
                break
            size = int.from_bytes(data[at + 1 : begin], "big")
            if begin + size > end:
                if size > KEPT_BYTES:
                    self._unread, self._flags = begin + size - end, flags
                    return messages
                break
            at = begin + size
            self._end(flags, data[begin:at] if size <= KEPT_BYTES else b"", messages)
        self._rest = data[at:]
        return messages

    def _end(self, flags: int, frame: bytes, messages: list[list[bytes]]) -> None:
        if flags & COMMAND:
            return
        self._frames.append(frame)
        if not flags & MORE:
            messages.append(self._frames)
            self._frames = []


class Connection:
    """A DEALER's connection to the ROUTER at `endpoint`; `begin` before anything is sent."""

    __slots__ = ("_identity", "_inbox", "_unsent", "fileno", "socket")

    def __init__(self, endpoint: str, identity: bytes) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING)
        self.fileno = self.socket.fileno()
        self._identity = identity
        self._inbox = Inbox()
        self._unsent = b""

    def begin(self, first: bytes = b"") -> None:
        """Wait for the greeting of the other end, then send `first`.

        libzmq takes nothing in behind a greeting before it has sent its own.

        Raises:
            ConnectionError: the other end has closed the connection.
            TimeoutError: there is no greeting.
        """
        left = GREETING_BYTES
        while left:
            found = len(self.socket.recv(left))
            if not found:
                raise ConnectionError("the server has closed a connection")
            left -= found
        self.socket.setblocking(False)
        self.send(ready(self._identity) + first)

    def send(self, data: bytes) -> bool:
        """Send `data`; False if some of it has to wait until `flush` is called."""
        if self._unsent:
            self._unsent += data
            return False
        sent = 0
        with suppress(BlockingIOError):
            sent = self.socket.send(data)
        self._unsent = data[sent:] if sent < len(data) else b""
        return not self._unsent

    def flush(self) -> bool:
        """Go on with what has to wait; whether all of it is sent."""
        data, self._unsent = self._unsent, b""
        return self.send(data) if data else True

    def receive(self) -> list[list[bytes]]:
        """Whole messages, with what has come in.

        Raises:
            ConnectionError: the server has closed it.
        """
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("the server has closed a connection")
        return self._inbox.feed(data)

    def close(self) -> None:
        """Close it at once."""
        self.socket.close()
