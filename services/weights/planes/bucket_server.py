"""Hands out buckets on TCP connections, with a thread for each: see `bucket_wire`.

A connection must show its grant within the time of a handshake. Of those that have not, there are
so many at most; one more costs the address that has the most of them its oldest.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import WireError, ends_process, service_thread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Refusals
from umbra.proto.records import Manifest
from umbra.proto.sockets import HANDSHAKE_MS, tcp_listener
from umbra.services.weights import delta
from umbra.services.weights.manifest import item_bytes
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.bucket_wire import (
    BEAT_S,
    REFUSED,
    SEALED_BYTES,
    WAIT,
    BucketOrder,
    Piece,
    Records,
)

ENCODED_TOGETHER = 8  # deltas for which senders are woken
THREADS = 4  # of the encoder, at most
LONGEST_PAUSE = 16  # versions for which a bucket whose deltas do not pay is not tried again
DELTA_SHARE = 0.5  # of a bucket's size: deltas that are larger together do not pay

Part = tuple[Piece, bytes | memoryview]
"""A piece and its bytes."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The delta from a bucket's content `base` to its content `result`."""

    base: int
    result: int
    data: bytes


@dataclass(slots=True)
class _ServedSlot:
    data: memoryview
    contents: Sequence[int]
    absent: set[int]  # buckets that have not arrived, or that another host has


class BucketStore:
    """Versions in their slots, and the deltas between consecutive ones. Thread-safe.

    Args:
        notify: called, from any thread, when something can be handed out that could not before.
    """

    def __init__(self, manifest: Manifest, notify: Callable[[], None]) -> None:
        self.manifest = manifest
        self._notify = notify
        self._lock = threading.Lock()
        self._slots: dict[int, _ServedSlot] = {}
        # By bucket; each delta starts where the one before it ends.
        self._deltas: list[deque[Delta]] = [deque() for _ in manifest.buckets]
        self._encoding: set[int] = set()

    def offer(
        self, slot: int, data: memoryview, contents: Sequence[int], absent: Iterable[int] = ()
    ) -> None:
        """Serve the version in `slot`: its bytes, content ids of its buckets, all but `absent`.

        Nothing changes if it is served already: some of those may have arrived.
        """
        with self._lock:
            if slot in self._slots and self._slots[slot].contents == contents:
                return
            self._slots[slot] = _ServedSlot(data, contents, set(absent))
        self._notify()

    def withdraw(self, slot: int) -> None:
        """Stop handing out `slot`: it is about to be written."""
        with self._lock:
            self._slots.pop(slot, None)

    def arrived(self, slot: int, bucket: int) -> None:
        """Hand out one more bucket of `slot`, complete and verified."""
        with self._lock:
            if slot in self._slots:
                self._slots[slot].absent.discard(bucket)
        self._notify()

    def encode_later(self, buckets: Iterable[int]) -> None:
        """Have receivers with a base wait: deltas of `buckets` are being made."""
        with self._lock:
            self._encoding.update(buckets)

    def encoded(self, bucket: int, delta: Delta | None) -> None:
        """Add the delta of `bucket`; None if it would not be smaller."""
        with self._lock:
            self._encoding.discard(bucket)
            chain = self._deltas[bucket]
            if delta is None or (chain and chain[-1].result != delta.base):
                chain.clear()
            if delta is not None:
                chain.append(delta)
                bound = DELTA_SHARE * self._size(bucket)
                while sum(len(link.data) for link in chain) > bound:
                    chain.popleft()
            worth_it = len(self._encoding) % ENCODED_TOGETHER == 0
        if worth_it:
            self._notify()

    def not_encoded(self, buckets: Iterable[int]) -> None:
        """Stop waiting for deltas of `buckets`."""
        with self._lock:
            self._encoding.difference_update(buckets)
        self._notify()

    def parts(
        self, bucket: int, content: int, bases: Sequence[int], part_bytes: int
    ) -> Iterable[Part] | None:
        """Return the pieces for a receiver that wants `content` of `bucket` and holds `bases`.

        Deltas if there are any from a base, else all bytes, in parts of `part_bytes`. None while
        there is nothing to send, or a delta is being made.
        """
        with self._lock:
            if any(bases):
                chain = self._chain(bucket, content, bases)
                if chain is not None:
                    return [(Piece(bucket, link.result, link.base, 0), link.data) for link in chain]
                if bucket in self._encoding:
                    return None
            data = self._dense(bucket, content)
        if data is None:
            return None
        return (
            (Piece(bucket, content, 0, offset), data[offset : offset + part_bytes])
            for offset in range(0, len(data), part_bytes)
        )

    def _chain(self, bucket: int, content: int, bases: Sequence[int]) -> list[Delta] | None:
        chain: list[Delta] = []
        for link in reversed(self._deltas[bucket]):
            if chain or link.result == content:
                chain.insert(0, link)
                if link.base in bases:
                    return chain
        return None

    def _dense(self, bucket: int, content: int) -> memoryview | None:
        start, end = self.manifest.buckets[bucket]
        for slot in self._slots.values():
            if slot.contents[bucket] == content and bucket not in slot.absent:
                return slot.data[start:end]
        return None

    def _size(self, bucket: int) -> int:
        start, end = self.manifest.buckets[bucket]
        return end - start


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version in its slot, with the content of every bucket."""

    slot: int
    data: memoryview
    contents: Sequence[int]


@dataclass(slots=True)
class _EncodingJob:
    old: StoredVersion
    new: StoredVersion
    todo: list[int]  # last first
    cancelled: threading.Event = field(default_factory=threading.Event)
    workers: list[Future[None]] = field(default_factory=list["Future[None]"])


class DeltaEncoder:
    """A maker of the deltas between two versions in their slots, in threads of its own."""

    def __init__(self, store: BucketStore, manifest: Manifest) -> None:
        self._store = store
        self._buckets = manifest.buckets
        self._items = item_bytes(manifest)
        self._pauses = [(0, 0)] * len(manifest.buckets)  # versions left, and how many the next time
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="umbra-delta")
        self._job: _EncodingJob | None = None

    def start(self, old: StoredVersion, new: StoredVersion, buckets: Iterable[int]) -> None:
        """Encode `buckets`; both versions must stay as they are until `stop` or the end."""
        self.stop()
        todo = [bucket for bucket in buckets if old.contents[bucket] != new.contents[bucket]]
        self._store.encode_later(todo)
        self._job = _EncodingJob(old, new, todo[::-1])
        # Receivers wait for these deltas: a thread that fails must not leave them waiting.
        work = ends_process(self._work, "the encoder of deltas")
        self._job.workers = [self._executor.submit(work, self._job) for _ in range(self._threads)]

    def let_go(self, slot: int) -> None:
        """Stop reading a slot; buckets that have no delta yet are sent whole."""
        if self._job is not None and slot in (self._job.old.slot, self._job.new.slot):
            self.stop()

    def stop(self) -> None:
        """End the encoding under way, within the time that a bucket takes."""
        if (job := self._job) is None:
            return
        job.cancelled.set()
        for worker in job.workers:
            worker.result()
        self._store.not_encoded(job.todo)
        self._job = None

    def close(self) -> None:
        self.stop()
        self._executor.shutdown()

    def _work(self, job: _EncodingJob) -> None:
        compressor = delta.compressor()
        while not job.cancelled.is_set():
            try:
                bucket = job.todo.pop()
            except IndexError:
                return
            self._store.encoded(bucket, self._encode(job, bucket, compressor))

    def _encode(self, job: _EncodingJob, bucket: int, compressor: Any) -> Delta | None:
        left, longest = self._pauses[bucket]
        if left:
            self._pauses[bucket] = (left - 1, longest)
            return None
        start, end = self._buckets[bucket]
        old, new = job.old.data[start:end], job.new.data[start:end]
        limit = int((end - start) * DELTA_SHARE)
        data = delta.encode(old, new, self._items[bucket], limit, compressor)
        longest = 0 if data is not None else min(LONGEST_PAUSE, 2 * longest or 1)
        self._pauses[bucket] = (longest, longest)
        if data is None:
            return None
        return Delta(job.old.contents[bucket], job.new.contents[bucket], data)


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
    """A server of the buckets of one store after another: a new layout takes a new one.

    Args:
        pace: how long a receiver may take for the bytes that it is sent.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(self, endpoint: str, security: Security = OPEN, pace: Pace = PACE) -> None:
        security.check_bind(endpoint)
        keep_freed_memory()
        self.secret = secrets.token_bytes(32)  # of the grants for buckets served here
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
                raise WireError(f"more than {CONNECTIONS} connections", code="too_many")
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
                reason = str(error) if known else "a connection without a grant"
                self.refusals.add(f"{reason}, from {peer.address} on buckets")
        finally:
            with self._news:
                self._peers.pop(peer, None)
            peer.connection.close()  # what the kernel has is still sent

    def _answer(self, records: Records) -> None:
        """Receive an order and send its buckets as soon as they are there.

        Raises:
            OSError: the receiver is gone, or takes too long; or there is another layout.
        """
        _, raw, _ = records.next(lambda _piece, _nbytes: None, ORDER_BYTES)
        with self._news:
            store = self._store
        try:
            try:
                order = msgspec.msgpack.decode(raw, type=BucketOrder)
            except msgspec.MsgspecError as error:
                raise WireError(f"malformed request: {error}") from None
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
                        raise ConnectionError("the layout has changed")
            for piece, data in parts:
                records.send(piece, data, self._pace.limit_s(len(data)))
        records.flush(self._pace.limit_s(0))
