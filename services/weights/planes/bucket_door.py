"""Where receivers connect for the buckets that they have ordered, and the threads that send them.

A connection must show the ticket of an order, soon, and is asked for nothing else. Strangers are
counted and sent away; they cost one socket each for a few seconds, and no thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from umbra.proto.deadline import Deadline, Pace
from umbra.proto.errors import WireError, service_thread
from umbra.proto.messages import Credit
from umbra.proto.net.zap import Refusals
from umbra.proto.sockets import HANDSHAKE_MS, tcp_listener
from umbra.services.weights.planes.bucket_records import (
    KERNELS_BYTES,
    TICKET_BYTES,
    Seal,
    pack_head,
    ticket,
)
from umbra.services.weights.planes.bucket_store import ORDERS, Outbox

SHOW_S = HANDSHAKE_MS / 1000  # for a connection to show its ticket
VALID_S = 60.0  # for a ticket to be shown
STRANGERS = 1024  # connections without a ticket at a time
AT_ONCE = 64  # taken in before those that are there get their turn
LOOK_S = 1.0  # a connection with nothing to send looks whether the other end is there
TOGETHER_BYTES = 64 << 10  # smaller records are sent together
BACKLOG = 128
CLOSE_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Errand:
    """What one receiver has ordered, to be sent on the connection that shows its ticket."""

    receiver: bytes
    outbox: Outbox  # with this order alone
    number: int  # of the order
    seal: Seal
    credit_bytes: int  # that may be under way
    valid_until: float = 0.0
    connection: socket.socket | None = None
    ended: bool = False
    show: bytes = b""


@dataclass(slots=True)
class _Stranger:
    connection: socket.socket
    address: str
    until: float
    shown: bytearray = field(default_factory=bytearray)


class BucketDoor:
    """Listens on a port of its own.

    Args:
        endpoint: to bind; port * picks a free one.
        pace: how long a receiver may take for the bytes that it is sent.
        refusals: takes note of strangers.

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
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self._lock = threading.Lock()  # guards what follows
        self._expected: dict[bytes, Errand] = {}  # by ticket, oldest first
        self._errands: dict[bytes, Errand] = {}  # by receiver, all that have not ended
        self._threads: set[threading.Thread] = set()
        self._news = threading.Condition()  # guards `_changes`
        self._changes = 0
        self._closing = threading.Event()
        self._thread = service_thread(self._main, "umbra-bucket-door")
        self._thread.start()

    def expect(self, key: bytes, errand: Errand) -> None:
        """A connection with the ticket of `key` may come; it replaces the receiver's last one.

        Raises:
            WireError: there are too many.
        """
        self.forget(errand.receiver)
        with self._lock:
            if len(self._errands) >= ORDERS:
                raise WireError(f"{ORDERS} connections fetch already", code="too_many")
            errand.show = ticket(key)
            errand.valid_until = time.monotonic() + VALID_S
            self._expected[errand.show] = self._errands[errand.receiver] = errand

    def forget(self, receiver: bytes) -> None:
        """Nothing more is sent to `receiver`."""
        with self._lock:
            if (errand := self._errands.get(receiver)) is not None:
                self._end(errand)

    def forget_all(self) -> None:
        """Nothing more is sent to anyone."""
        with self._lock:
            for errand in list(self._errands.values()):
                self._end(errand)
        self.look()

    def look(self) -> None:
        """There may be something to send that was not there before."""
        with self._news:
            self._changes += 1
            self._news.notify_all()

    def close(self) -> None:
        """End all connections and threads."""
        if self._closing.is_set():
            return
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

    # -- strangers --------------------------------------------------------------------------------

    def _main(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._listening:
                    self._take_in()
                elif (stranger := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    self._hear(stranger)
            self._forget_late(time.monotonic())
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()

    def _take_in(self) -> None:
        for _ in range(AT_ONCE):
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
            stranger = _Stranger(connection, str(address[0]), until)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._strangers) > STRANGERS:
                # Of the address that has the most, so that nobody crowds out the others.
                crowd = Counter(one.address for one in self._strangers.values())
                most = crowd.most_common(1)[0][0]
                oldest = next(s for s in self._strangers.values() if s.address == most)
                self._refuse(oldest, "one too many of those that show no ticket")

    def _hear(self, stranger: _Stranger) -> None:
        try:
            shown = stranger.connection.recv(TICKET_BYTES - len(stranger.shown))
        except BlockingIOError:
            return
        except OSError:
            shown = b""
        stranger.shown += shown
        if not shown:
            self._refuse(stranger, "a connection that went without a ticket")
        elif len(stranger.shown) == TICKET_BYTES:
            with self._lock:
                errand = self._expected.pop(bytes(stranger.shown), None)
                if errand is not None:
                    self._let_in(stranger, errand)
            if errand is None:
                self._refuse(stranger, "a connection with a ticket of no order")

    def _forget_late(self, now: float) -> None:
        while self._strangers:
            stranger = next(iter(self._strangers.values()))
            if now < stranger.until:
                break
            self._refuse(stranger, "a connection that showed no ticket in time")
        with self._lock:
            while self._expected:
                errand = next(iter(self._expected.values()))
                if now < errand.valid_until:
                    break
                self._end(errand)

    def _refuse(self, stranger: _Stranger, what: str) -> None:
        self._refusals.add(f"{what}, from {stranger.address} on buckets")
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._release(stranger)
        stranger.connection.close()

    def _release(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)

    # -- errands ----------------------------------------------------------------------------------

    def _let_in(self, stranger: _Stranger, errand: Errand) -> None:
        self._release(stranger)
        connection = errand.connection = stranger.connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if errand.credit_bytes < KERNELS_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, errand.credit_bytes)
        thread = service_thread(lambda: self._run(errand, connection), "umbra-bucket-sender")
        self._threads.add(thread)
        thread.start()

    def _end(self, errand: Errand) -> None:
        """Under the lock: it is over, whoever still works on it."""
        errand.ended = True
        self._expected.pop(errand.show, None)
        if self._errands.get(errand.receiver) is errand:
            del self._errands[errand.receiver]
        if errand.connection is not None:
            with suppress(OSError):  # the other end was faster
                errand.connection.shutdown(socket.SHUT_RDWR)

    def _run(self, errand: Errand, connection: socket.socket) -> None:
        """On a thread of its own: send what there is, until all is sent."""
        try:
            self._send_all(errand, _Sending(connection, errand, self._pace))
        except OSError as error:
            if not errand.ended:
                log.info("%r stopped fetching buckets: %s", errand.receiver, error)
        finally:
            with self._lock:
                errand.connection = None
                self._end(errand)
                self._threads.discard(threading.current_thread())
            connection.close()  # what the kernel has is still sent

    def _send_all(self, errand: Errand, sending: _Sending) -> None:
        while not errand.ended:
            with self._news:
                seen = self._changes
            message = errand.outbox.next(errand.receiver)
            if message is not None:
                body, raw = message
                for piece, data in zip(body.pieces, raw, strict=True):
                    sending.add(pack_head(piece, len(data)), data)
                credit = Credit(number=errand.number, credit_bytes=sum(map(len, raw)))
                errand.outbox.credit(errand.receiver, credit)
            else:
                sending.flush()
                if not errand.outbox.open or sending.is_left:
                    return
                with self._news:
                    self._news.wait_for(self._changed_since(seen, errand), LOOK_S)

    def _changed_since(self, seen: int, errand: Errand) -> Callable[[], bool]:
        return lambda: self._changes != seen or errand.ended


class _Sending:
    """Records on one connection; small ones are sent together."""

    def __init__(self, connection: socket.socket, errand: Errand, pace: Pace) -> None:
        self._connection = connection
        self._seal = errand.seal
        self._pace = pace
        self._waiting = bytearray()
        self._block = memoryview(bytearray(0))
        self._together_bytes = min(TOGETHER_BYTES, errand.credit_bytes)

    def add(self, head: bytes, raw: bytes | memoryview) -> None:
        """Send a record, or keep it for a moment.

        Raises:
            OSError: the other end is gone, or takes too long.
        """
        if self._seal.hides and len(self._block) < len(raw) + self._seal.trailer_bytes:
            self._block = memoryview(bytearray(len(raw) + self._seal.trailer_bytes))
        for part in self._seal.seal(head, raw, self._block):
            if len(part) < self._together_bytes:
                self._waiting += part
            else:
                self._send(self._waiting, more=True)
                self._waiting.clear()
                self._send(part)
        if len(self._waiting) >= self._together_bytes:
            self.flush()

    def flush(self) -> None:
        """Send what waits; raises as `add`."""
        self._send(self._waiting)
        self._waiting.clear()

    @property
    def is_left(self) -> bool:
        """Whether the other end is gone."""
        try:
            self._connection.settimeout(0)
            self._connection.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # closed, or it says what it has no reason to say

    def _send(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> None:
        if data:
            self._connection.settimeout(self._pace.limit_s(len(data)))  # of all of it
            self._connection.sendall(data, socket.MSG_MORE if more else 0)
