"""Hands out buckets over a socket and a thread of their own, apart from the control socket."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import zmq

from umbra.proto.errors import WireError
from umbra.proto.messages import Credit, FetchBuckets, Nack
from umbra.proto.records import Manifest
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.net.server import Request, Server
from umbra.services.runtime.planes.bucket_store import BucketStore, Outbox, Part
from umbra.services.runtime.process.threads import service_thread
from umbra.services.runtime.weights.malloc_tuning import keep_freed_memory

CHANNEL = "buckets"
POLL_S = 0.2
CLOSE_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


class BucketServer:
    """Serves the buckets of one store after another: a new layout takes a new one.

    Args:
        name: sender name in the headers.
        incarnation: of this process.
        endpoint: address to bind; port * picks a free one.
        security: keys of this process.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self, name: str, incarnation: str, endpoint: str, security: Security = OPEN
    ) -> None:
        keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = Server(self._context, name, incarnation, security)
        try:
            self.endpoint = self._server.bind(CHANNEL, endpoint, (FetchBuckets, Credit))
        except BaseException:
            self._server.close()
            self._context.term()
            raise
        self._wake: Callable[[], None] = self._server.waker()
        self._outbox = Outbox(0, _nothing)
        self._lock = threading.Lock()  # guards _outbox against a change of the layout
        self._closing = threading.Event()
        self.sent_bytes = 0
        self._thread = service_thread(self._main, "umbra-buckets")
        self._thread.start()

    def serve(self, manifest: Manifest) -> BucketStore:
        """Begin with a layout; orders for the one before are forgotten."""
        store = BucketStore(manifest, self._wake)
        with self._lock:
            self._outbox = Outbox(len(manifest.buckets), store.parts)
        return store

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
                    self._outbox.order(request.identity, message)
                except WireError as error:
                    self._server.counters[error.code] += 1
                    nack = Nack(code=error.code, reason=str(error), path=error.path)
                    self._server.reply(request, nack)
            case Credit() as message:
                self._outbox.credit(request.identity, message)
            case _:
                pass  # an Ok or Nack that nobody asked for

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
        self.sent_bytes += sum(map(len, raw))
        return True


def _nothing(
    _bucket: int, _content: int, _bases: Sequence[int], _size: int
) -> Iterable[Part] | None:
    """There is no layout yet."""
    return None
