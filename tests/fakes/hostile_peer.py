"""Somebody with a key of a run who sends what the key's role never would, and what it costs."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgpack
from fakes.keys import of
from fakes.slowness import limit

from umbra.proto import sockets
from umbra.proto.access import KeyRole, allowed_bytes
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import FinishRun, Leave, Message, Nack, Role, TaskLeases
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.proto.sockets import Context

WAIT_S = limit(30.0)
GRACE_S = 0.1  # for the answer to what was thrown; not everything is answered
REFUSED_BYTES = 64 << 10  # of a frame that its role may not send
ENDS = (FinishRun, Leave)  # said by nobody whom the run knows


def memory(pid: int, which: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


def begin_peak(pid: int) -> int:
    """Reset the peak of a process; return the bytes that it holds now."""
    before = memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return before


def costly_bytes(kind: type[Message], role: KeyRole, most: int) -> int:
    """Bytes of a costly body of `kind` from `role`: what it may have, `most` at most."""
    return min(allowed_bytes(kind, role), most) or REFUSED_BYTES


class HostilePeer:
    """One socket of somebody who holds the key of `role`, connected to a `server`.

    Args:
        name: of the process that it pretends to be.
    """

    def __init__(
        self,
        context: Context,
        keys: Path,
        role: KeyRole,
        endpoint: str,
        server: Role,
        name: str,
        incarnation: str = "1",
    ) -> None:
        self.name = name
        self.answers: Counter[str] = Counter()  # refusals by what they say, others by type
        curve = of(keys, role).connecting(server)
        self.socket = sockets.dealer(context, endpoint, f"{name}.0".encode(), curve)
        self._encoder = Encoder(name, incarnation)
        self._next = self._thrown = 1 << 20
        self._is_open = False  # what was thrown last, and was not answered yet
        self._unasked: list[Message] = []

    def call(self, body: Message) -> Message:
        """The answer to `body`, a sound message."""
        number, frames = self._encoder.encode(body)
        self.socket.send_multipart(frames)
        return self._answer(number)

    def throw(self, kind: str, body: bytes, sender: str) -> None:
        """Send `body` as a message of `kind`, and wait until the server is through with it."""
        self._thrown = self._next + 1
        self._is_open = True
        for one, content in ((kind, body), ("Nothing", b"\x80")):
            self._next += 1
            header = {
                "major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "type": one, "id": self._next,
                "sender": sender, "incarnation": self._encoder.incarnation,
            }  # fmt: skip
            self.socket.send_multipart([msgpack.packb(header), content])
        answer = self._answer(self._next)  # a peer's messages are done in their order
        assert isinstance(answer, Nack) and answer.code == "unknown_type"
        until = time.monotonic() + GRACE_S  # requests that were carried out are answered after that
        while self._is_open and (left := until - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)):
                self._take(-1)

    def pushed(self, wait_s: float) -> Message | None:
        """Return the server's next unasked message; None if nothing comes."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            if self._unasked:
                return self._unasked.pop(0)
            if self.socket.poll(round(1000 * left)):
                self._take(-1)
        return None

    def close(self) -> None:
        self.socket.close(linger=0)

    def _answer(self, number: int) -> Message:
        until = time.monotonic() + WAIT_S
        while (left := until - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)) and (body := self._take(number)) is not None:
                return body
        raise AssertionError(f"no answer to {self.name}")

    def _take(self, number: int) -> Message | None:
        """Take what has come; the message, if it is the answer to request `number`."""
        envelope = decode(self.socket.recv_multipart())
        body, asked = envelope.body, envelope.header.reply_to
        if asked == number:
            return body
        if asked is None and not isinstance(body, Nack):
            self._unasked.append(body)
        elif asked is None or asked == self._thrown:
            self._is_open = False
            self.answers[_kind(body)] += 1
        return None


def _kind(answer: Message) -> str:
    if isinstance(answer, TaskLeases) and answer.refused and not answer.accepted:
        return next(iter(answer.refused.values())).partition(":")[0] + " sample"
    return answer.code if isinstance(answer, Nack) else type(answer).__name__
