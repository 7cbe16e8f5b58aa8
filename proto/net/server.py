"""The binding side of the wire: ROUTER sockets of the buffer and of the hub, polled by one thread.

Bad input never gets further than this file: it is counted, answered with a Nack where the sender
can be told, and dropped. So is what the key of a connection does not allow (`proto/access.py`). A
request that was resent is answered from the last replies, so that a lost reply never makes an
operation happen twice.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, cast

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.access import (
    KEY_ROLES,
    QUESTIONS,
    RULES,
    KeyRole,
    allowed_bytes,
    may_connect,
    socket_bytes,
)
from umbra.proto.bounds import NAME_CHARS, one_line
from umbra.proto.codec import (
    Encoder,
    Frame,
    check_frames,
    decode_body,
    decode_header,
    kind_of,
    nack,
)
from umbra.proto.errors import WireError
from umbra.proto.messages import Event, Header, Message, Ok
from umbra.proto.net.keys import OPEN, Keys, Security
from umbra.proto.sockets import NOBLOCK, Context, Socket

BURST = 256  # decisions before the messages of those who are in get their turn
NAMED = 64  # refusals told apart; there is no end to what peers without keys may try
OTHERS = "others"
# What fails before there is anything to ask about; what we refuse ourselves is known already.
UNASKED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HANDSHAKE_FAULTS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "a connection without keys",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "a connection with keys of another run",
}
LISTENED_S = 1.0  # at most, from one poll to the next: silence while nobody listened is none
REQUESTS_KEPT = 1 << 15  # of all peers, to know resends by: several times what comes in RESEND_S
REPLY_BYTES_KEPT = 64 << 20  # of all peers, and the last reply at any rate
ZERO_COPY_BYTES = 1 << 20  # replies from this size are sent without a copy
LARGE_BYTES = 4 << 10  # frames from this size are decoded where they were received
FRAMES_KEPT = 3  # of a message: header, body, and one too many, by which it is refused
RECEIVE_BURST = 256  # messages taken from one socket before the others get their turn
RECEIVE_BYTES = 512 << 10  # the same in bytes: a commit should not wait for a long burst

MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
ANSWERED = Ok()  # the body of a request once there is an answer to it

_RequestKey: TypeAlias = tuple[str, bytes, str, int]  # channel, identity, incarnation, id
log = logging.getLogger(__name__)


class Refusals:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, what: str) -> None:
        """Count a refusal; log it the 1st, 2nd, 4th, ... time, so that nobody can fill a disk."""
        what = one_line(what, NAME_CHARS)  # as a key of `Status.refused`
        key = what if what in self.counts or len(self.counts) < NAMED else OTHERS
        self.counts[key] += 1
        count = self.counts[key]
        if not count & (count - 1):
            log.warning("refused %s (%d so far)", what, count)


class ZapGate:
    """The allow-list and the handshakes of the bound sockets of `context`, its only gate."""

    def __init__(self, context: Context, keys: Keys, refusals: Refusals) -> None:
        self._context, self._refusals = context, refusals
        self._roles: Mapping[bytes, KeyRole] = {
            z85.decode(public): role for role, public in keys.roles.items()
        }
        self._zap = sockets.allow_list(context)
        self._watched: dict[Socket, tuple[str, Socket]] = {}

    def watch(self, socket: Socket, name: str) -> list[Socket]:
        """Watch the handshakes of `socket`; return all sockets of the gate, which are polled."""
        self._watched[sockets.handshakes(self._context, socket, UNASKED)] = (name, socket)
        return [self._zap, *self._watched]

    def serve(self, socket: Socket) -> None:
        with suppress(zmq.Again):
            for _ in range(BURST):
                if socket is self._zap:
                    asked = socket.recv_multipart(zmq.NOBLOCK)
                    socket.send_multipart(zap_reply(asked, self._roles, self._refusals))
                else:
                    event = recv_monitor_message(socket, zmq.NOBLOCK)
                    what = HANDSHAKE_FAULTS.get(event["value"], "a broken handshake")
                    self._refusals.add(f"{what} on {self._watched[socket][0]}")

    def close(self) -> None:
        """Close its own sockets; those it watches must still be open."""
        for monitor, (_, socket) in self._watched.items():
            socket.disable_monitor()
            monitor.close(linger=0)
        self._watched.clear()
        self._zap.close(linger=0)


def zap_reply(
    frames: Sequence[bytes], roles: Mapping[bytes, KeyRole], refusals: Refusals
) -> list[bytes]:
    """Return the reply to a ZAP request; only a known key of the right role is admitted."""
    number = frames[1] if len(frames) > 1 else b""
    if len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
        socket, address = frames[2].decode(), frames[3].decode(errors="replace")
        role = roles.get(frames[6])
        if role is not None and may_connect(role, socket):
            return [b"1.0", number, b"200", b"OK", role.encode(), b""]
        key = "an unknown key" if role is None else f"the {role} key"
        refusals.add(f"{key} from {address} on {socket}")
    return [b"1.0", number, b"400", b"this key does not open this socket", b"", b""]


def _role_of(frame: zmq.Frame) -> KeyRole | None:
    """Return the role of the connection that `frame` came over; None where there are no keys."""
    try:
        role = cast(KeyRole, frame.get("User-Id"))
    except zmq.ZMQError:
        return None
    return role if role in KEY_ROLES else None


class Request(msgspec.Struct, frozen=True, gc=False):
    """A message that arrived, where its reply goes, and the role of its key if there are keys."""

    channel: str
    identity: bytes
    header: Header
    body: Message
    role: KeyRole | None = None
    frame: Frame = b""  # of the body, as it came

    @property
    def bare(self) -> Request:
        """Return the part that a reply needs, so that nothing large waits with the reply."""
        return Request(self.channel, self.identity, self.header, ANSWERED)


class _BoundChannel(NamedTuple):
    name: str
    socket: Socket
    accepts: tuple[type[Message], ...]
    endpoint: str


class Resends:
    """The last requests and their replies, so that a resend is answered and not done twice.

    The least recently sent are evicted first. A later resend is not done twice either:
    operations are idempotent by the ids that they carry.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[_RequestKey, list[bytes]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: _RequestKey) -> list[bytes] | None:
        """Return the frames of the reply, empty while it is due; None if the request is new."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def asked(self, key: _RequestKey) -> None:
        self._known[key] = []
        self._shrink()

    def answered(self, key: _RequestKey, frames: list[bytes]) -> None:
        if key in self._known:
            self._bytes += _size(frames) - _size(self._known[key])
            self._known[key] = frames
            self._known.move_to_end(key)
            self._shrink()

    def _shrink(self) -> None:
        while len(self._known) > REQUESTS_KEPT or (
            self._bytes > REPLY_BYTES_KEPT and len(self._known) > 1
        ):
            self._bytes -= _size(self._known.popitem(last=False)[1])


class Server:
    """Bound sockets of process `name`, polled and answered from one thread."""

    def __init__(
        self,
        context: Context,
        name: str,
        incarnation: str,
        security: Security = OPEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.refusals = Refusals()
        self.resends = Resends()
        self.security = security
        self.listened_s = 0.0  # time since the start, less that in which nobody polled
        self._context = context
        self._encoder = Encoder(name, incarnation)
        self._poller = zmq.Poller()
        self._channels: dict[Socket, _BoundChannel] = {}
        self._by_name: dict[str, _BoundChannel] = {}
        self._events: Socket | None = None  # to those who watch
        self._clock = clock
        self._polled_at = clock()
        self._waker = sockets.Waker(context, f"wake-{id(self)}")
        self._poller.register(self._waker.socket, zmq.POLLIN)
        keys = security.keys
        self._gate = None if keys is None else ZapGate(context, keys, self.refusals)

    def bind(self, channel: str, endpoint: str, accepts: tuple[type[Message], ...]) -> str:
        """Open `channel` at `endpoint`; return the endpoint it really has.

        Raises as `sockets.router`, and UsageError if others can reach it and there are no keys.
        """
        self.security.check_bind(endpoint)
        curve = self.security.binding(channel)
        socket, actual = sockets.router(self._context, endpoint, curve, socket_bytes(channel))
        bound = _BoundChannel(channel, socket, accepts, actual)
        self._channels[socket] = self._by_name[channel] = bound
        self._poller.register(socket, zmq.POLLIN)
        self._watch(channel, socket)
        return actual

    def bind_events(self, endpoint: str) -> str:
        """Publish there the events that come on other channels; return where that really is."""
        self.security.check_bind(endpoint)
        curve = self.security.binding("events")
        self._events, actual = sockets.publisher(self._context, endpoint, curve)
        self._watch("events", self._events)
        return actual

    def poll(self, timeout_s: float) -> list[Request]:
        """Return requests that arrived within `timeout_s` seconds, already validated."""
        requests: list[Request] = []
        ready = self._poller.poll(timeout=max(0, round(timeout_s * 1000)))
        now = self._clock()
        self.listened_s += min(now - self._polled_at, LISTENED_S)
        self._polled_at = now
        for socket, _ in ready:
            channel = self._channels.get(socket)
            if socket is self._waker.socket:
                self._waker.drain()
            elif channel is not None:
                requests.extend(self._receive(channel))
            elif self._gate is not None:
                self._gate.serve(socket)
        return requests

    def reply(self, request: Request, body: Message) -> None:
        """Answer `request`, now or later; if `body` cannot be encoded, with a Nack that says so."""
        try:
            _, frames = self._encoder.encode(body, reply_to=request.header.id)
        except WireError as error:
            self.counters[error.code] += 1
            log.exception("cannot answer %s", request.header.sender)
            _, frames = self._encoder.encode(nack(error), reply_to=request.header.id)
        self.resends.answered(_key(request.channel, request.identity, request.header), frames)
        self._send(self._by_name[request.channel], request.identity, frames)

    def push(self, channel: str, identity: bytes, body: Message) -> bool:
        """Send `body` unasked; False when the peer cannot be reached now."""
        _, frames = self._encoder.encode(body)
        return self._send(self._by_name[channel], identity, frames)

    def wake(self) -> None:
        """End a `poll` under way early, from any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Close all sockets; queued frames get the bounded LINGER."""
        for opened in (self._gate, *self._channels, self._events, self._waker):
            if opened is not None:
                opened.close()
        self._channels.clear()

    def _watch(self, name: str, socket: Socket) -> None:
        for own in self._gate.watch(socket, name) if self._gate else ():
            self._poller.register(own, zmq.POLLIN)

    def _receive(self, channel: _BoundChannel) -> list[Request]:
        requests: list[Request] = []
        left, is_open = RECEIVE_BYTES, self._gate is None
        for _ in range(RECEIVE_BURST):
            if left <= 0:
                break
            try:
                # More always comes after it. With keys the frame names its sender.
                first = channel.socket.recv(NOBLOCK, copy=is_open)
            except zmq.Again:
                break
            frames: list[Frame] = []
            more = True
            while more:
                frame = channel.socket.recv(NOBLOCK, copy=False)
                more, size = frame.more, len(frame)  # without asking the socket, as multipart does
                left -= size
                if len(frames) < FRAMES_KEPT:
                    frames.append(frame.bytes if size < LARGE_BYTES else frame.buffer)
            if isinstance(first, bytes):
                identity, role = first, None
            else:
                identity, role = first.bytes, _role_of(first)
            request = self._decode(channel, identity, frames, role)
            if request is not None:
                requests.append(request)
        return requests

    def _decode(
        self, channel: _BoundChannel, identity: bytes, frames: list[Frame], role: KeyRole | None
    ) -> Request | None:
        header: Header | None = None
        try:
            header = decode_header(frames)
            kind = kind_of(header)
            most_bytes = self._check_allowed(channel, header, kind, role)
            if kind is Event:
                check_frames(header, frames, most_bytes)
                if self._events is not None:
                    with suppress(zmq.Again):  # as it came: watchers decode it
                        self._events.send_multipart(frames, zmq.NOBLOCK)
                return None
            # Of those who only ask questions nothing need be remembered.
            is_kept = header.reply_to is None and kind not in QUESTIONS
            key = _key(channel.name, identity, header)
            if is_kept and (reply := self.resends.find(key)) is not None:
                # Before its body costs anything: resends come when there is much to do.
                self.counters["resent"] += 1
                if reply:
                    self._send(channel, identity, reply)
                return None
            envelope = decode_body(header, kind, frames, most_bytes)
        except WireError as error:
            self._refuse(channel, identity, header, error)
            return None
        if is_kept:
            self.resends.asked(key)
        return Request(channel.name, identity, header, envelope.body, role, frames[1])

    def _check_allowed(
        self, channel: _BoundChannel, header: Header, kind: type[Message], role: KeyRole | None
    ) -> int:
        """Return the most bytes of the body, before it is decoded; WireError if none may come."""

        def refuse(what: str, code: str) -> WireError:
            return WireError(f"{header.type} {what}", path="type", code=code)

        if kind not in channel.accepts and RULES[kind].socket != "any":
            raise refuse(f"does not belong on the {channel.name} socket", "wrong_socket")
        keyed = self._gate is not None
        most_bytes = 0 if keyed and role is None else allowed_bytes(kind, role)
        if not most_bytes and keyed:
            self.refusals.add(f"{header.type} of {header.sender!r}, which has the {role} key")
            raise refuse(f"is not allowed with the {role} key", "not_allowed")
        if not most_bytes:
            raise refuse("is not a request", "unexpected")
        return most_bytes

    def _refuse(
        self, channel: _BoundChannel, identity: bytes, header: Header | None, error: WireError
    ) -> None:
        self.counters[error.code] += 1
        count = self.counters[error.code]
        if not count & (count - 1):  # 1st, 2nd, 4th, ...: whoever sends rubbish fills no disk
            name = identity.rpartition(b".")[0] or identity  # without what makes it a secret
            where = f"{name!r} on {channel.name} ({error.code}, {count} so far)"
            log.warning("refused a message from %s: %s", where, error)
        reply_to = None if header is None else header.id
        self._send(channel, identity, self._encoder.encode(nack(error), reply_to=reply_to)[1])

    def _send(self, channel: _BoundChannel, identity: bytes, frames: list[bytes]) -> bool:
        try:
            # Only frames of 64 KiB and more are sent without a copy (zmq.COPY_THRESHOLD).
            copy = _size(frames) < ZERO_COPY_BYTES
            *first, last = [identity, *frames]
            for frame in first:
                channel.socket.send(frame, MORE, copy)
            channel.socket.send(last, NOBLOCK, copy)
        except zmq.ZMQError as error:
            # A peer that is gone, or that does not read: never a reason to wait or to die. It will
            # ask again (resend) if it is still there.
            reason = "unreachable" if error.errno == errno.EHOSTUNREACH else "backlogged"
            self.counters[reason] += 1
            return False
        return True


def _key(channel: str, identity: bytes, header: Header) -> _RequestKey:
    return channel, identity, header.incarnation, header.id


def _size(frames: list[bytes]) -> int:
    return sum(map(len, frames))
