"""Hands out buckets apart from the control socket: orders come over a socket of their own, and
buckets go over the connections that receivers make for them (`bucket_door.py`).

A receiver of an older protocol gives no key with its order, and is sent its buckets where it asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import WireError, service_thread
from umbra.proto.messages import BucketPort, Credit, FetchBuckets, Nack
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Request, Server
from umbra.proto.records import Manifest
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.bucket_door import BucketDoor, Errand
from umbra.services.weights.planes.bucket_records import seal_of
from umbra.services.weights.planes.bucket_store import SMALLEST_FRAME, BucketStore, Outbox, Part

CHANNEL = "buckets"
POLL_S = 0.2
CLOSE_DEADLINE_S = 5.0
RECORD_BYTES = 1 << 20  # that are sealed at once: they are still in the cache when they are sent
PACE = Pace(30.0, LEAST_RATE)

log = logging.getLogger(__name__)


class BucketServer:
    """Serves the buckets of one store after another: a new layout takes a new one.

    Args:
        name: sender name in the headers.
        incarnation: of this process.
        endpoint: address to bind; port * picks a free one.
        security: keys of this process.
        door: address for the connections over which buckets go; empty = any port of that host.
        pace: how long a receiver may take for the bytes that it is sent.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        endpoint: str,
        security: Security = OPEN,
        door: str = "",
        pace: Pace = PACE,
    ) -> None:
        keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = Server(self._context, name, incarnation, security)
        try:
            self.endpoint = self._server.bind(CHANNEL, endpoint, (FetchBuckets, Credit))
            door = door or f"{self.endpoint.rpartition(':')[0]}:*"
            security.check_bind(door)
            self._door = BucketDoor(door, pace, self._server.refusals)
        except BaseException:
            self._server.close()
            self._context.term()
            raise
        self._wake: Callable[[], None] = self._server.waker()
        self._security = security
        self._count, self._find = 0, _nothing
        self._outbox = Outbox(0, _nothing)
        self._lock = threading.Lock()  # guards _outbox against a change of the layout
        self._closing = threading.Event()
        self._thread = service_thread(self._main, "umbra-buckets")
        self._thread.start()

    def serve(self, manifest: Manifest) -> BucketStore:
        """Begin with a layout; orders for the one before are forgotten."""
        store = BucketStore(manifest, self._look)
        with self._lock:
            self._count, self._find = len(manifest.buckets), store.parts
            self._outbox = Outbox(self._count, self._find)
            self._door.forget_all()
        return store

    @property
    def port(self) -> int:
        """Of the connections over which buckets go."""
        return self._door.port

    @property
    def refused(self) -> int:
        """How often somebody was refused for lack of the right key."""
        return self._server.refusals.counts.total()

    def close(self) -> None:
        """Stop serving."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(CLOSE_DEADLINE_S)
        self._door.close()

    def _look(self) -> None:
        """From any thread: there is something to hand out that was not there before."""
        self._wake()
        self._door.look()

    # -- the thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        while not self._closing.is_set():
            requests = self._server.poll(POLL_S)
            with self._lock:
                for request in requests:
                    self._handle(request)
                self._pump()
        self._server.close()
        self._context.destroy(linger=0)

    def _handle(self, request: Request) -> None:
        match request.body:
            case FetchBuckets() as message:
                try:
                    self._order(request.identity, message)
                except WireError as error:
                    self._server.counters[error.code] += 1
                    nack = Nack(code=error.code, reason=str(error), path=error.path)
                    self._server.reply(request, nack)
            case Credit() as message:
                self._outbox.credit(request.identity, message)
            case _:
                pass  # an Ok or Nack that nobody asked for

    def _order(self, receiver: bytes, message: FetchBuckets) -> None:
        """Take an order; it replaces the receiver's last."""
        key = message.key
        if key is None:
            self._door.forget(receiver)
            self._outbox.order(receiver, message)
            return
        self._outbox.forget(receiver)
        keyed = self._security.keys is not None
        encrypted = self._security.encrypt_weights or message.encrypt
        seal = seal_of(key, keyed=keyed, encrypted=encrypted)
        if keyed and message.frame_bytes > RECORD_BYTES:
            message = msgspec.structs.replace(message, frame_bytes=RECORD_BYTES)
        outbox = Outbox(self._count, self._find)
        outbox.order(receiver, message)
        credit = max(message.credit_bytes, SMALLEST_FRAME)
        self._door.expect(key, Errand(receiver, outbox, message.number, seal, credit))
        place = BucketPort(number=message.number, port=self.port, encrypted=encrypted)
        self._server.push(CHANNEL, receiver, place)  # who is away asks again

    def _pump(self) -> None:
        """Send what may be sent: to each receiver one message in turn."""
        busy = self._outbox.open
        while busy and not self._closing.is_set():
            busy = [receiver for receiver in busy if self._send(receiver)]

    def _send(self, receiver: bytes) -> bool:
        message = self._outbox.next(receiver)
        if message is None:
            return False
        body, raw = message
        if not self._server.push(CHANNEL, receiver, body, raw):
            log.info("%r stopped fetching buckets", receiver)
            self._outbox.forget(receiver)  # it asks again if it is still there
            return False
        return True


def _nothing(
    _bucket: int, _content: int, _bases: Sequence[int], _size: int
) -> Iterable[Part] | None:
    """There is no layout yet."""
    return None
