"""Hands out buckets: orders come over a ZeroMQ socket, buckets go over TCP connections.

An order carries the key of a connection (`bucket_records.py`). The receiver connects to our port
and shows the ticket of that key; a thread then sends it what it ordered. A connection must show
its ticket within the time of a handshake: unauthenticated peers cost one socket each for a few
seconds, and no thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq

from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import WireError, service_thread
from umbra.proto.messages import BucketPort, FetchBuckets, Nack
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Request, Server
from umbra.proto.net.zap import Refusals
from umbra.proto.records import Manifest
from umbra.proto.sockets import HANDSHAKE_MS, tcp_listener
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.bucket_records import (
    RECORD_BYTES,
    TAG_BYTES,
    TICKET_BYTES,
    Seal,
    pack_head,
    seal_of,
    ticket,
)
from umbra.services.weights.planes.bucket_store import BucketStore

CHANNEL = "buckets"
POLL_S = 0.2
CLOSE_DEADLINE_S = 5.0
PACE = Pace(30.0, LEAST_RATE)
SEALED_BYTES = 1 << 20  # sealed at once: they are still in the cache when they are sent
SMALLEST_FRAME = 1 << 10
ORDERS = 4096  # receivers at a time
SHOW_S = HANDSHAKE_MS / 1000  # for a connection to show its ticket
VALID_S = 60.0  # for a ticket to be shown
UNKNOWN_PEERS = 1024  # connections without a ticket at a time
ACCEPTED_AT_ONCE = 64
LOOK_S = 1.0  # an idle connection checks whether its peer is there
TOGETHER_BYTES = 64 << 10  # smaller records are sent together
BACKLOG = 128

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BucketOrder:
    """What one receiver fetches, to be sent on the connection that shows its ticket."""

    receiver: bytes
    message: FetchBuckets
    store: BucketStore
    seal: Seal | None
    ticket: bytes
    valid_until: float
    connection: socket.socket | None = None
    ended: bool = False


def check_order(message: FetchBuckets, buckets: int) -> None:
    """Check an order for a layout of so many `buckets`.

    Raises:
        WireError: it makes no sense.
    """
    count = len(message.wanted)
    if any(len(values) != count for values in (message.contents, *message.bases)):
        raise WireError("contents and bases must be as many as wanted", path="contents")
    if not all(0 <= bucket < buckets for bucket in message.wanted):
        raise WireError(f"there are {buckets} buckets", path="wanted")
    if not SMALLEST_FRAME <= message.frame_bytes <= RECORD_BYTES:
        raise WireError(
            f"from {SMALLEST_FRAME} to {RECORD_BYTES} bytes, not {message.frame_bytes}",
            path="frame_bytes",
        )


class BucketServer:
    """Serves the buckets of one store after another: a new layout takes a new one.

    Args:
        name: sender name in the headers.
        incarnation: of this process.
        endpoint: address to bind for orders; port * picks a free one.
        security: keys of this process.
        listen: address for the connections; empty = any port of that host.
        pace: how long a receiver may take for the bytes that it is sent.

    Raises:
        StartupError: an address is taken.
        UsageError: one is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        endpoint: str,
        security: Security = OPEN,
        listen: str = "",
        pace: Pace = PACE,
    ) -> None:
        keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = Server(self._context, name, incarnation, security)
        try:
            self.endpoint = self._server.bind(CHANNEL, endpoint, (FetchBuckets,))
            listen = listen or f"{self.endpoint.rpartition(':')[0]}:*"
            security.check_bind(listen)
            self._connections = BucketConnections(listen, pace, self._server.refusals)
        except BaseException:
            self._server.close()
            self._context.term()
            raise
        self._wake = self._server.waker()
        self._security = security
        self._store: BucketStore | None = None
        self._lock = threading.Lock()  # guards _store
        self._closing = threading.Event()
        self._thread = service_thread(self._main, "umbra-buckets")
        self._thread.start()

    def serve(self, manifest: Manifest) -> BucketStore:
        """Serve a layout; orders for the one before are forgotten."""
        store = BucketStore(manifest, self._connections.notify)
        with self._lock:
            self._store = store
            self._connections.forget_all()
        return store

    @property
    def port(self) -> int:
        return self._connections.port

    @property
    def refused(self) -> int:
        """Number of peers that were refused for lack of the right key."""
        return self._server.refusals.counts.total()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(CLOSE_DEADLINE_S)
        self._connections.close()

    def _main(self) -> None:
        while not self._closing.is_set():
            for request in self._server.poll(POLL_S):
                with self._lock:
                    self._handle(request)
        self._server.close()
        self._context.destroy(linger=0)

    def _handle(self, request: Request) -> None:
        if not isinstance(request.body, FetchBuckets):
            return  # an Ok or Nack that nobody asked for
        try:
            self._order(request.identity, request.body)
        except WireError as error:
            self._server.counters[error.code] += 1
            nack = Nack(code=error.code, reason=str(error), path=error.path)
            self._server.reply(request, nack)

    def _order(self, receiver: bytes, message: FetchBuckets) -> None:
        """Take an order, in place of the receiver's last one."""
        store = self._store
        check_order(message, len(store.manifest.buckets) if store is not None else 0)
        if store is None:
            return  # the receiver orders again when there is a layout
        seal = seal_of(message.key, keyed=self._security.keys is not None)
        if seal is not None and message.frame_bytes > SEALED_BYTES:
            message = msgspec.structs.replace(message, frame_bytes=SEALED_BYTES)
        valid_until = time.monotonic() + VALID_S
        shown = ticket(message.key)
        self._connections.expect(BucketOrder(receiver, message, store, seal, shown, valid_until))
        place = BucketPort(number=message.number, port=self.port)
        self._server.push(CHANNEL, receiver, place)  # a receiver that is away orders again


@dataclass(slots=True)
class _UnknownPeer:
    connection: socket.socket
    address: str
    until: float
    shown: bytearray = field(default_factory=bytearray)


class BucketConnections:
    """Accepts connections, each for one order, and sends what was ordered.

    Args:
        endpoint: to bind; port * picks a free one.
        pace: how long a receiver may take for the bytes that it is sent.
        refusals: counts peers without a ticket.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or none.
    """

    def __init__(self, endpoint: str, pace: Pace, refusals: Refusals) -> None:
        self._pace = pace
        self._refusals = refusals
        self._listening = tcp_listener(endpoint, BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._unknown: dict[socket.socket, _UnknownPeer] = {}  # oldest first
        self._lock = threading.Lock()  # guards _expected, _orders, _threads
        self._expected: dict[bytes, BucketOrder] = {}  # by ticket, oldest first
        self._orders: dict[bytes, BucketOrder] = {}  # by receiver, all that have not ended
        self._threads: set[threading.Thread] = set()
        self._news = threading.Condition()  # guards _changes
        self._changes = 0
        self._closing = threading.Event()
        self._thread = service_thread(self._main, "umbra-bucket-door")
        self._thread.start()

    def expect(self, order: BucketOrder) -> None:
        """Admit a connection with the ticket of `order`; it replaces the receiver's last one.

        Raises:
            WireError: there are too many.
        """
        with self._lock:
            if (before := self._orders.get(order.receiver)) is not None:
                self._end(before)
            if len(self._orders) >= ORDERS:
                raise WireError(f"{ORDERS} connections fetch already", code="too_many")
            self._expected[order.ticket] = self._orders[order.receiver] = order

    def forget_all(self) -> None:
        with self._lock:
            for order in list(self._orders.values()):
                self._end(order)
        self.notify()

    def notify(self) -> None:
        """Wake the senders: a store has something new."""
        with self._news:
            self._changes += 1
            self._news.notify_all()

    def close(self) -> None:
        self._closing.set()
        self.forget_all()
        self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        deadline = Deadline(CLOSE_DEADLINE_S)
        self._thread.join(CLOSE_DEADLINE_S)
        self._listening.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(deadline.left_s)

    # -- connections without a ticket -------------------------------------------------------------

    def _main(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listening:
                    self._accept()
                elif (peer := self._unknown.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._read_ticket(peer)
            self._expire(time.monotonic())
        for peer in list(self._unknown.values()):
            self._release(peer).close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it was gone before it came, or there are no files left
                if not self._closing.wait(0.01):
                    self._refusals.add(f"a connection on buckets: {error.strerror}")
                return
            connection.setblocking(False)
            until = time.monotonic() + SHOW_S
            self._unknown[connection] = _UnknownPeer(connection, str(address[0]), until)
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._unknown) > UNKNOWN_PEERS:
                # Of the address that has the most, so that nobody crowds out the others.
                crowd = Counter(peer.address for peer in self._unknown.values())
                most = crowd.most_common(1)[0][0]
                oldest = next(p for p in self._unknown.values() if p.address == most)
                self._refuse(oldest, "one too many of those that show no ticket")

    def _read_ticket(self, peer: _UnknownPeer) -> None:
        try:
            shown = peer.connection.recv(TICKET_BYTES - len(peer.shown))
        except BlockingIOError:
            return
        except OSError:
            shown = b""
        peer.shown += shown
        if not shown:
            self._refuse(peer, "a connection that went without a ticket")
        elif len(peer.shown) == TICKET_BYTES:
            with self._lock:
                order = self._expected.pop(bytes(peer.shown), None)
                if order is not None:
                    self._start(order, self._release(peer))
            if order is None:
                self._refuse(peer, "a connection with a ticket of no order")

    def _expire(self, now: float) -> None:
        while self._unknown:
            peer = next(iter(self._unknown.values()))
            if now < peer.until:
                break
            self._refuse(peer, "a connection that showed no ticket in time")
        with self._lock:
            while self._expected:
                order = next(iter(self._expected.values()))
                if now < order.valid_until:
                    break
                self._end(order)

    def _refuse(self, peer: _UnknownPeer, what: str) -> None:
        self._refusals.add(f"{what}, from {peer.address} on buckets")
        self._release(peer).close()

    def _release(self, peer: _UnknownPeer) -> socket.socket:
        del self._unknown[peer.connection]
        self._selector.unregister(peer.connection)
        return peer.connection

    # -- orders -----------------------------------------------------------------------------------

    def _start(self, order: BucketOrder, connection: socket.socket) -> None:
        order.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = service_thread(lambda: self._run(order, connection), "umbra-bucket-sender")
        self._threads.add(thread)
        thread.start()

    def _end(self, order: BucketOrder) -> None:
        """End an order, also one that is being sent; under the lock."""
        order.ended = True
        self._expected.pop(order.ticket, None)
        if self._orders.get(order.receiver) is order:
            del self._orders[order.receiver]
        if order.connection is not None:
            with suppress(OSError):  # the other end was faster
                order.connection.shutdown(socket.SHUT_RDWR)

    def _run(self, order: BucketOrder, connection: socket.socket) -> None:
        """Send an order, on a thread of its own."""
        try:
            self._send_all(order, _Sender(connection, order.seal, self._pace))
        except OSError as error:
            if not order.ended:
                log.info("%r stopped fetching buckets: %s", order.receiver, error)
        finally:
            with self._lock:
                order.connection = None
                self._end(order)
                self._threads.discard(threading.current_thread())
            connection.close()  # what the kernel has is still sent

    def _send_all(self, order: BucketOrder, sender: _Sender) -> None:
        message, find = order.message, order.store.parts
        for index, (bucket, content) in enumerate(
            zip(message.wanted, message.contents, strict=True)
        ):
            bases = [held[index] for held in message.bases]
            while True:
                with self._news:
                    seen = self._changes
                if (parts := find(bucket, content, bases, message.frame_bytes)) is not None:
                    break
                sender.flush()
                if order.ended or sender.is_left:
                    return
                with self._news:
                    if self._changes == seen:
                        self._news.wait(LOOK_S)
            for piece, data in parts:
                if order.ended:
                    return
                sender.add(pack_head(piece, len(data)), data)
        sender.flush()


class _Sender:
    """Sends records on one connection, small ones together."""

    def __init__(self, connection: socket.socket, seal: Seal | None, pace: Pace) -> None:
        self._connection = connection
        self._seal = seal
        self._pace = pace
        self._waiting = bytearray()
        self._block = memoryview(bytearray(0))

    def add(self, head: bytes, raw: bytes | memoryview) -> None:
        """Send a record, or keep it until there are more.

        Raises:
            OSError: the other end is gone, or takes too long.
        """
        if self._seal is not None:
            size = len(raw) + TAG_BYTES
            if len(self._block) < size:
                self._block = memoryview(bytearray(size))
            self._seal.seal(head, raw, self._block[:size])
            raw = self._block[:size]
        for part in (head, raw):
            if len(part) < TOGETHER_BYTES:
                self._waiting += part
            else:
                self._send(self._waiting, more=True)
                self._waiting.clear()
                self._send(part)
        if len(self._waiting) >= TOGETHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what waits; raises as `add`."""
        self._send(self._waiting)
        self._waiting.clear()

    @property
    def is_left(self) -> bool:
        try:
            self._connection.settimeout(0)
            self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # closed, or it sends what it must not

    def _send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        if data:
            self._connection.settimeout(self._pace.limit_s(len(data)))  # of all of it
            self._connection.sendall(data, socket.MSG_MORE if more else 0)
