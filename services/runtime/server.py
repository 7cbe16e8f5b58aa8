"""The binding side of the wire: ROUTER sockets of the buffer and of the hub, polled by one thread.

Bad input never gets further than this file: it is counted, answered with a Nack where the sender
can be told, and dropped. A request that was resent is answered from the last replies, so that a
lost reply never makes an operation happen twice.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode_body, decode_header, nack
from umbra.proto.errors import WireError
from umbra.proto.messages import ANY, Header, Message

REPLIES_KEPT = 16  # per peer, to answer resends from
REPLY_BYTES_KEPT = 16 << 20  # of all peers, in equal shares; the last one of each at any rate
PEERS_KEPT = 8192  # known senders; a flood of made-up names takes no more memory than these
PENDING_KEPT = 256  # per peer; one-way messages stay here too, as nobody answers them
ZERO_COPY_BYTES = 1 << 20  # replies from this size are sent without a copy
RECEIVE_BURST = 256  # messages taken from one socket before the others get their turn
RECEIVE_BYTES = 512 << 10  # the same in bytes: a commit should not wait for a long burst

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A message that arrived, and where its reply goes."""

    channel: str
    identity: bytes
    header: Header
    body: Message


@dataclass(slots=True)
class _Channel:
    name: str
    socket: zmq.Socket[bytes]
    accepts: tuple[type[Message], ...]
    endpoint: str


@dataclass(slots=True)
class _Peer:
    """What must be remembered of one sender to know its resends, by request id."""

    incarnation: str
    pending: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    replies: OrderedDict[int, list[bytes]] = field(default_factory=OrderedDict[int, list[bytes]])
    reply_bytes: int = 0

    def asked(self, number: int) -> None:
        """A request came in that has no answer yet; it must outlive later ones that have."""
        self.pending[number] = None
        while len(self.pending) > PENDING_KEPT:
            self.pending.popitem(last=False)

    def answered(self, number: int, frames: list[bytes], share: int) -> None:
        """A request was answered with `frames`; replies of `share` bytes may be kept."""
        self.pending.pop(number, None)
        self.replies[number] = frames
        self.reply_bytes += _size(frames)
        while len(self.replies) > 1 and (
            len(self.replies) > REPLIES_KEPT or self.reply_bytes > share
        ):
            self.reply_bytes -= _size(self.replies.popitem(last=False)[1])


class Server:
    """Bound sockets, polled and answered from one thread.

    Args:
        context: ZeroMQ context; terminated by its owner.
        name: sender name in the headers of replies.
        incarnation: of this process.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, incarnation: str
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._context = context
        self._encoder = Encoder(name, incarnation)
        self._poller = zmq.Poller()
        self._channels: dict[zmq.Socket[bytes], _Channel] = {}
        self._by_name: dict[str, _Channel] = {}
        self._relay: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._peers: dict[tuple[str, bytes], _Peer] = {}
        self._wake: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._wake_lock = threading.Lock()

    def bind(self, channel: str, endpoint: str, accepts: tuple[type[Message], ...]) -> str:
        """Open `channel` at `endpoint`; the endpoint it really has.

        Raises:
            StartupError: the address is taken or not ours.
        """
        socket, actual = sockets.router(self._context, endpoint)
        bound = _Channel(channel, socket, accepts, actual)
        self._channels[socket] = self._by_name[channel] = bound
        self._poller.register(socket, zmq.POLLIN)
        return actual

    def endpoint(self, channel: str) -> str:
        """Where `channel` is bound."""
        return self._by_name[channel].endpoint

    def relay_events(self, endpoint_in: str, endpoint_out: str) -> tuple[str, str]:
        """Relay telemetry from publishers to subscribers; the endpoints of both sides."""
        inward, actual_in, outward, actual_out = sockets.relay(
            self._context, endpoint_in, endpoint_out
        )
        self._relay = (inward, outward)
        self._poller.register(inward, zmq.POLLIN)
        self._poller.register(outward, zmq.POLLIN)
        return actual_in, actual_out

    def poll(self, timeout_s: float) -> list[Request]:
        """Requests that arrived within `timeout_s` seconds, already validated."""
        requests: list[Request] = []
        for socket, _ in self._poller.poll(timeout=max(0, round(timeout_s * 1000))):
            channel = self._channels.get(socket)
            if self._wake and socket is self._wake[0]:
                _drain(socket)
            elif channel is None:
                self._relay_from(socket)
            else:
                requests.extend(self._receive(channel))
        return requests

    def reply(self, request: Request, body: Message) -> None:
        """Answer `request`, now or later; if `body` cannot be encoded, with a Nack that says so."""
        try:
            _, frames = self._encoder.encode(body, reply_to=request.header.id)
        except WireError as error:
            self.counters[error.code] += 1
            log.exception("cannot answer %s", request.header.sender)
            _, frames = self._encoder.encode(nack(error), reply_to=request.header.id)
        peer = self._peers.get((request.channel, request.identity))
        if peer is not None and peer.incarnation == request.header.incarnation:
            share = REPLY_BYTES_KEPT // len(self._peers)
            peer.answered(request.header.id, frames, share)
        self._send(self._by_name[request.channel], request.identity, frames)

    def push(
        self, channel: str, identity: bytes, body: Message, raw: Sequence[bytes | memoryview] = ()
    ) -> bool:
        """Send `body` unasked; False when the peer cannot be reached now.

        `raw` frames are not copied: their memory must stay until they are sent.
        """
        _, frames = self._encoder.encode(body)
        return self._send(self._by_name[channel], identity, frames, raw)

    def waker(self) -> Callable[[], None]:
        """A function that ends a `poll` under way early, from any thread, until `close`."""
        inward, outward = sockets.pair(self._context, f"wake-{id(self)}")
        self._wake = (inward, outward)
        self._poller.register(inward, zmq.POLLIN)
        lock = self._wake_lock

        def wake() -> None:
            with lock, suppress(zmq.Again):  # full: it is awake, with plenty to do
                if not outward.closed:
                    outward.send(b"", zmq.NOBLOCK)

        return wake

    def close(self) -> None:
        """Close all sockets; what is queued for sending gets the bounded LINGER."""
        for socket in self._channels:
            socket.close()
        for socket in self._relay or ():
            socket.close()
        with self._wake_lock:
            for socket in self._wake or ():
                socket.close(linger=0)
        self._channels.clear()

    def _receive(self, channel: _Channel) -> list[Request]:
        requests: list[Request] = []
        left = RECEIVE_BYTES
        for _ in range(RECEIVE_BURST):
            if left <= 0:
                break
            try:
                identity, *frames = channel.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            left -= _size(frames)
            request = self._decode(channel, identity, frames)
            if request is not None:
                requests.append(request)
        return requests

    def _decode(self, channel: _Channel, identity: bytes, frames: list[bytes]) -> Request | None:
        try:
            header = decode_header(frames)
            if header.reply_to is None and self._is_resend(channel, identity, header):
                return None  # before its body costs anything: resends come when there is much to do
            envelope = decode_body(header, frames)
            if not isinstance(envelope.body, (*channel.accepts, *ANY)):
                raise WireError(
                    f"{envelope.header.type} does not belong on the {channel.name} socket",
                    path="type",
                    code="wrong_socket",
                )
        except WireError as error:
            self._refuse(channel, identity, frames, error)
            return None
        if header.reply_to is None:
            self._peers[channel.name, identity].asked(header.id)
        return Request(channel.name, identity, header, envelope.body)

    def _refuse(
        self, channel: _Channel, identity: bytes, frames: list[bytes], error: WireError
    ) -> None:
        self.counters[error.code] += 1
        count = self.counters[error.code]
        if not count & (count - 1):  # 1st, 2nd, 4th, ...: whoever sends rubbish fills no disk
            log.warning(
                "refused a message from %r on %s (%s, %d so far): %s",
                identity, channel.name, error.code, count, error,
            )  # fmt: skip
        try:
            reply_to = decode_header(frames).id
        except WireError:
            reply_to = None
        _, answer = self._encoder.encode(nack(error), reply_to=reply_to)
        self._send(channel, identity, answer)

    def _is_resend(self, channel: _Channel, identity: bytes, header: Header) -> bool:
        key = (channel.name, identity)
        peer = self._peers.get(key)
        if peer is None or peer.incarnation != header.incarnation:
            self._peers.pop(key, None)
            peer = self._peers[key] = _Peer(header.incarnation)
            if len(self._peers) > PEERS_KEPT:
                del self._peers[next(iter(self._peers))]
        frames = peer.replies.get(header.id)
        if frames is None and header.id not in peer.pending:
            return False
        self.counters["resent"] += 1
        if frames is not None:
            self._send(channel, identity, frames)
        return True

    def _send(
        self,
        channel: _Channel,
        identity: bytes,
        frames: list[bytes],
        raw: Sequence[bytes | memoryview] = (),
    ) -> bool:
        try:
            # Only frames of 64 KiB and more are sent without a copy (zmq.COPY_THRESHOLD).
            copy = not raw and _size(frames) < ZERO_COPY_BYTES
            channel.socket.send_multipart([identity, *frames, *raw], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            # A peer that is gone, or that does not read: never a reason to wait or to die. It will
            # ask again (resend) if it is still there.
            reason = "unreachable" if error.errno == errno.EHOSTUNREACH else "backlogged"
            self.counters[reason] += 1
            return False
        return True

    def _relay_from(self, socket: zmq.Socket[bytes]) -> None:
        assert self._relay is not None
        inward, outward = self._relay
        target = outward if socket is inward else inward
        for _ in range(RECEIVE_BURST):
            try:
                target.send_multipart(socket.recv_multipart(zmq.NOBLOCK), zmq.NOBLOCK)
            except zmq.Again:
                return


def _size(frames: Sequence[bytes]) -> int:
    return sum(map(len, frames))


def _drain(socket: zmq.Socket[bytes]) -> None:
    with suppress(zmq.Again):
        while True:
            socket.recv(zmq.NOBLOCK)
