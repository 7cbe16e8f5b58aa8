"""Hands out buckets on TCP connections, with a thread for each: see `bucket_wire`.

A connection must show its grant within the time of a handshake. Of those that have not, there are
so many at most; one more costs the address that has the most of them its oldest.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import WireError, service_thread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.zap import Refusals
from umbra.proto.records import Manifest
from umbra.proto.sockets import HANDSHAKE_MS, tcp_listener
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.bucket_store import BucketStore
from umbra.services.weights.planes.bucket_wire import (
    BEAT_S,
    REFUSED,
    SEALED_BYTES,
    WAIT,
    BucketOrder,
    Piece,
    Records,
)

CLOSE_DEADLINE_S = 5.0
PACE = Pace(30.0, LEAST_RATE)
ORDER_BYTES = 4 << 20  # at most
CONNECTIONS = 4096  # at a time
SHOW_S = HANDSHAKE_MS / 1000  # for a connection to show its grant
UNKNOWN_PEERS = 256  # connections that have shown none, at a time
BACKLOG = 128
# Of a connection without an order, whose other end may be a host that has lost its power.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    address: str
    until: float = field(default_factory=lambda: time.monotonic() + SHOW_S)
    known: bool = False
    thread: threading.Thread | None = None

    def end(self) -> None:
        with suppress(OSError):  # the other end was faster
            self.connection.shutdown(socket.SHUT_RDWR)


class BucketServer:
    """Serves the buckets of one store after another: a new layout takes a new one.

    Args:
        endpoint: to bind; port * picks a free one.
        security: keys of this process.
        pace: how long a receiver may take for the bytes that it is sent.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(self, endpoint: str, security: Security = OPEN, pace: Pace = PACE) -> None:
        security.check_bind(endpoint)
        keep_freed_memory()
        self.secret = secrets.token_bytes(32)  # of the grants for what is handed out here
        self.refusals = Refusals()
        self._sealed = security.keys is not None
        self._pace = pace
        self._listening = tcp_listener(endpoint, BACKLOG)
        host, _, _ = endpoint.rpartition(":")
        self.endpoint = f"{host}:{self._listening.getsockname()[1]}"
        self._news = threading.Condition()  # guards all of these
        self._changes = 0
        self._store: BucketStore | None = None
        self._peers: dict[_Peer, None] = {}  # oldest first
        self._closing = False
        self._thread = service_thread(self._accept, "umbra-buckets")
        self._thread.start()

    def serve(self, manifest: Manifest) -> BucketStore:
        """Serve a layout; orders for the one before are forgotten."""
        store = BucketStore(manifest, self._notify)
        with self._news:
            self._store = store
        self._notify()
        return store

    def close(self) -> None:
        with self._news:
            self._closing = True
            peers = list(self._peers)
        self._notify()
        with suppress(OSError):  # closed before
            self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        for peer in peers:
            peer.end()
        deadline = Deadline(CLOSE_DEADLINE_S)
        self._thread.join(CLOSE_DEADLINE_S)
        self._listening.close()
        for peer in peers:
            if peer.thread is not None:
                peer.thread.join(deadline.left_s)

    def _notify(self) -> None:
        """Wake the senders: there is something new."""
        with self._news:
            self._changes += 1
            self._news.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError as error:  # it was gone before it came, or there are no files left
                if self._closing:
                    return
                self.refusals.add(f"a connection on buckets: {error.strerror}")
                time.sleep(0.01)
                continue
            peer = _Peer(connection, str(address[0]))
            peer.thread = service_thread(partial(self._serve, peer), "umbra-bucket-sender")
            with self._news:
                if self._closing:
                    connection.close()
                    return
                self._peers[peer] = None
                peer.thread.start()
                unknown = [p for p in self._peers if not p.known]
                if len(unknown) > UNKNOWN_PEERS:
                    # Of the address that has the most, so that nobody crowds out the others.
                    most = Counter(p.address for p in unknown).most_common(1)[0][0]
                    oldest = next(p for p in unknown if p.address == most)
                    del self._peers[oldest]
                    oldest.end()

    def _serve(self, peer: _Peer) -> None:
        """Answer one order after the other; the thread of a connection."""

        def idle() -> None:
            if not peer.known and time.monotonic() >= peer.until:
                raise TimeoutError("no grant in time")

        try:
            records = Records(peer.connection, idle)
            records.admit(self.secret, sealed=self._sealed)
            with self._news:
                peer.known = sum(p.known for p in self._peers) < CONNECTIONS
            if not peer.known:
                raise WireError(f"a connection beyond {CONNECTIONS}", code="too_many")
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                peer.connection.setsockopt(socket.IPPROTO_TCP, option, value)
            while True:
                self._answer(records)
        except (OSError, WireError) as error:
            if peer.known:
                log.debug("%s fetches no more: %s", peer.address, error)
            elif not self._closing:
                known = isinstance(error, WireError)
                what = str(error) if known else "a connection without a grant"
                self.refusals.add(f"{what}, from {peer.address} on buckets")
        finally:
            with self._news:
                self._peers.pop(peer, None)
            peer.connection.close()  # what the kernel has is still sent

    def _answer(self, records: Records) -> None:
        """Receive an order, and send what it asks for, as soon as that is there.

        Raises:
            WireError: it makes no sense.
            OSError: the receiver is gone, or takes too long; or there is another layout.
        """
        _, raw, _ = records.next(lambda _piece, _nbytes: None, ORDER_BYTES)
        with self._news:
            store = self._store
        try:
            try:
                order = msgspec.msgpack.decode(raw, type=BucketOrder)
            except msgspec.MsgspecError as error:
                raise WireError(f"no order: {error}") from None
            order.check(len(store.manifest.buckets) if store is not None else 0)
        except WireError as error:
            records.send(Piece(REFUSED), str(error).encode())
            records.flush(self._pace.limit_s(0))
            raise
        if store is None:
            return
        frame_bytes = min(order.frame_bytes, SEALED_BYTES if self._sealed else order.frame_bytes)
        for index, (bucket, content) in enumerate(zip(order.wanted, order.contents, strict=True)):
            bases = [held[index] for held in order.bases]
            while True:
                with self._news:
                    seen = self._changes
                if (parts := store.parts(bucket, content, bases, frame_bytes)) is not None:
                    break
                records.flush(self._pace.limit_s(0))
                with self._news:
                    if self._changes == seen and not self._news.wait(BEAT_S):
                        records.send(Piece(WAIT), b"")
                    if self._closing or self._store is not store:
                        raise ConnectionError("there is another layout now")
            for piece, data in parts:
                records.send(piece, data, self._pace.limit_s(len(data)))
        records.flush(self._pace.limit_s(0))
