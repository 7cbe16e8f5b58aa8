"""Plane `tcp`, the source's side: hands out buckets, with a thread for each connection.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import msgspec

from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import WireError, ends_process, service_thread
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Refusals
from umbra.proto.records import BucketsAt, Manifest
from umbra.proto.sockets import HANDSHAKE_MS, reachable, tcp_listener
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights import delta
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import item_bytes, owned_buckets
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.bucket_wire import (
    BEAT_S,
    REFUSED,
    SEALED_BYTES,
    WAIT,
    BucketOrder,
    Part,
    Piece,
    Records,
    grant,
)
from umbra.services.weights.planes.plane import HubEnd, Settled

FAST_LINK = 1e9  # bytes per second; encoding on two cores is hardly faster
ENCODED_TOGETHER = 8  # deltas for which senders are woken
THREADS = 4  # of the encoder, at most
LONGEST_PAUSE = 16  # versions for which a bucket whose deltas do not pay is not tried again
DELTA_SHARE = 0.5  # of a bucket's size: deltas that are larger together do not pay

CLOSE_DEADLINE_S = 5.0
PACE = Pace(30.0, LEAST_RATE)
ORDER_BYTES = 4 << 20  # at most
CONNECTIONS = 4096  # at a time
SHOW_S = HANDSHAKE_MS / 1000  # for a connection to show its grant
UNKNOWN_PEERS = 256  # connections that have shown none, at a time
BACKLOG = 128
# Of a connection without an order, whose other end may be a host that has lost its power.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StoredVersion:
    """A version in its slot, with the content of every bucket.

    `absent`: buckets that have not arrived, or that another host has.
    """

    slot: int
    data: memoryview
    contents: Sequence[int]
    absent: set[int] = field(default_factory=set[int])


class BucketStore:
    """Versions in their slots, and the deltas between consecutive ones. Thread-safe.

    One thread publishes and withdraws; deltas are made in threads of the store's own. `notify` is
    called, from any thread, when something more can be handed out.
    """

    def __init__(self, manifest: Manifest, notify: Callable[[], None]) -> None:
        self.manifest = manifest
        self._notify = notify
        self._lock = threading.Lock()  # guards these three
        self._slots: dict[int, StoredVersion] = {}
        # By bucket; each delta starts where the one before it ends.
        self._deltas: list[deque[Part]] = [deque() for _ in manifest.buckets]
        self._encoding: set[int] = set()  # buckets with a delta to come
        self._last: StoredVersion | None = None  # published, while its slot holds it
        self._todo: list[int] = []  # of them, last first
        self._read: set[int] = set()  # slots that deltas are made of
        self._workers: list[Future[None]] = []
        self._items = item_bytes(manifest)
        self._pauses = [(0, 0)] * len(manifest.buckets)  # versions left, and how many the next time
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="umbra-delta")

    def offer(self, version: StoredVersion) -> None:
        """Serve a version; if it is served already, nothing changes: more of it may be there."""
        with self._lock:
            served = self._slots.get(version.slot)
            if served is not None and served.contents == version.contents:
                return
            self._slots[version.slot] = version
        self._notify()

    def publish(self, version: StoredVersion, *, deltas: bool) -> None:
        """Serve a version; with `deltas`, make those from the one before, if that is there."""
        before = self._last
        if before is None or (before.slot, before.contents) != (version.slot, version.contents):
            self._last = version
            if deltas and before is not None:
                # Before the bytes are offered, so that those who wait for them get the deltas.
                self._encode(before, version)
        self.offer(version)

    def withdraw(self, slot: int) -> None:
        """Stop handing out and reading `slot`: it is about to be written.

        That takes no longer than the delta of one bucket; those without a delta are sent whole.
        """
        if slot in self._read:
            self._stop()
        if self._last is not None and self._last.slot == slot:
            self._last = None
        with self._lock:
            self._slots.pop(slot, None)

    def arrived(self, slot: int, bucket: int) -> None:
        """Hand out one more bucket of `slot`, complete and verified."""
        with self._lock:
            if slot in self._slots:
                self._slots[slot].absent.discard(bucket)
        self._notify()

    def encoded(self, bucket: int, link: Part | None) -> None:
        """Add the delta of `bucket`; None if it would not be smaller."""
        with self._lock:
            self._encoding.discard(bucket)
            chain = self._deltas[bucket]
            if link is None or (chain and chain[-1][0].result != link[0].base):
                chain.clear()
            if link is not None:
                chain.append(link)
                start, end = self.manifest.buckets[bucket]
                while sum(len(data) for _, data in chain) > DELTA_SHARE * (end - start):
                    chain.popleft()
            worth_it = len(self._encoding) % ENCODED_TOGETHER == 0
        if worth_it:
            self._notify()

    def parts(
        self, bucket: int, content: int, bases: Sequence[int], part_bytes: int
    ) -> Sequence[Part] | None:
        """Return the pieces for a receiver that wants `content` of `bucket` and holds `bases`.

        Deltas if there are any from a base, else all bytes, in parts of `part_bytes`. None while
        there is nothing to send, or a delta is being made.
        """
        with self._lock:
            if any(bases):
                chain: list[Part] = []
                for link in reversed(self._deltas[bucket]):
                    if chain or link[0].result == content:
                        chain.insert(0, link)
                        if link[0].base in bases:
                            return chain
                if bucket in self._encoding:
                    return None
            start, end = self.manifest.buckets[bucket]
            for held in self._slots.values():
                if held.contents[bucket] == content and bucket not in held.absent:
                    data = held.data[start:end]
                    return [
                        (Piece(bucket, content, 0, at), data[at : at + part_bytes])
                        for at in range(0, len(data), part_bytes)
                    ]
        return None

    def close(self) -> None:
        """End the encoding under way."""
        self._stop()
        self._executor.shutdown()

    def _stop(self) -> None:
        self._todo.clear()
        for worker in self._workers:
            worker.result()
        self._read.clear()
        with self._lock:
            self._encoding.clear()
        self._notify()

    def _encode(self, old: StoredVersion, new: StoredVersion) -> None:
        self._stop()
        places = enumerate(zip(old.contents, new.contents, strict=True))
        todo = [bucket for bucket, (was, now) in places if was != now and bucket not in new.absent]
        with self._lock:
            self._encoding.update(todo)
        self._todo, self._read = todo[::-1], {old.slot, new.slot}

        def work() -> None:
            compressor = delta.compressor()
            while True:
                try:
                    bucket = self._todo.pop()
                except IndexError:
                    return
                made = self._delta(bucket, old.data, new.data, compressor)
                piece = Piece(bucket, new.contents[bucket], old.contents[bucket])
                self.encoded(bucket, None if made is None else (piece, made))

        # Receivers wait for these deltas: a thread that fails must not leave them waiting.
        guarded = ends_process(work, "the encoder of deltas")
        self._workers = [self._executor.submit(guarded) for _ in range(self._threads)]

    def _delta(
        self, bucket: int, old: memoryview, new: memoryview, compressor: Any
    ) -> bytes | None:
        left, longest = self._pauses[bucket]
        if left:
            self._pauses[bucket] = (left - 1, longest)
            return None
        start, end = self.manifest.buckets[bucket]
        limit = int((end - start) * DELTA_SHARE)
        made = delta.encode(old[start:end], new[start:end], self._items[bucket], limit, compressor)
        longest = 0 if made is not None else min(LONGEST_PAUSE, 2 * longest or 1)
        self._pauses[bucket] = (longest, longest)
        return made


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    address: str
    until: float = field(default_factory=lambda: time.monotonic() + SHOW_S)
    known: bool = False
    thread: threading.Thread = field(init=False)

    def end(self) -> None:
        with suppress(OSError):  # the other end was faster
            self.connection.shutdown(socket.SHUT_RDWR)


class BucketServer:
    """A server of the buckets of one store after another; `pace` limits how slow a receiver is.

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
        self.store: BucketStore | None = None  # of the layout
        self._peers: dict[_Peer, None] = {}  # oldest first
        self._closing = False
        self._thread = service_thread(self._accept, "umbra-buckets")
        self._thread.start()

    def serve(self, manifest: Manifest) -> BucketStore:
        """Serve a layout; orders for the one before are forgotten, and its store is closed."""
        if self.store is not None:
            self.store.close()
        store = BucketStore(manifest, self._notify)
        with self._news:
            self.store = store
        self._notify()
        return store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
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
            for option in KEEPALIVE:
                peer.connection.setsockopt(*option)
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
        _, raw = records.next(most=ORDER_BYTES)
        with self._news:
            store = self.store
        try:
            order = msgspec.msgpack.decode(raw, type=BucketOrder)
            order.check(len(store.manifest.buckets) if store is not None else 0)
        except (msgspec.MsgspecError, WireError) as error:
            reason = f"malformed request: {error}"
            records.send(Piece(REFUSED), reason.encode())
            records.flush(self._pace.limit_s(0))
            raise WireError(reason) from None
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
                    if self._closing or self.store is not store:
                        raise ConnectionError("the layout has changed")
            for piece, data in parts:
                records.send(piece, data, self._pace.limit_s(len(data)))
        records.flush(self._pace.limit_s(0))


@dataclass(slots=True)
class _Fetcher:
    """A receiver that fetches by plane tcp, or a relay to which others may be sent."""

    host: str
    serves: str  # weights endpoint, of a relay that was not lost
    buckets: BucketsAt | None  # of such a relay
    by_tcp: bool
    source: str = ""  # the relay that it was last sent to
    rate: float = inf  # of its link, bytes per second


class TcpHub(HubEnd):
    """The hub's end: the buckets, their deltas, and who fetches from whom.

    Relays fetch from one another, in a chain in the order in which they subscribed: the first one
    from the hub, every other one from the relay before it, so that the hub sends each byte once,
    however many nodes there are. Receivers that are no relays fetch from the hub.

    Args:
        owner: trainer host whose buckets lie in its arena, where there are several.
    Raises as `BucketServer`.
    """

    plane = "tcp"

    def __init__(
        self, endpoint: str, config: WeightHubConfig, security: Security = OPEN, owner: int = 0
    ) -> None:
        self.parts: Mapping[int, BucketsAt] = {}  # of the other owners of buckets
        self._owner = owner
        self._absent: set[int] = set()  # buckets of others
        self._always = config.delta == "always"
        self.server = BucketServer(endpoint, security, config.pace)
        self.buckets = BucketsAt(endpoint=reachable(self.server.endpoint), key=self.server.secret)
        self._fetchers: dict[str, _Fetcher] = {}
        self._arena: Arena | None = None
        self._deltas = config.delta != "off"

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._arena = arena
        mine = owned_buckets(manifest).get(self._owner, [])
        self._absent = set(range(len(manifest.buckets))).difference(mine)
        self.server.serve(manifest)

    @property
    def chain(self) -> dict[str, BucketsAt]:
        """Return the relays that fetch from one another, in order."""
        return {n: one.buckets for n, one in self._fetchers.items() if one.by_tcp and one.buckets}

    def relay_at(self, host: str, avoid: str = "") -> str:
        relays = (one for one in self._fetchers.values() if one.buckets is not None)
        return next((o.serves for o in relays if o.host == host and o.serves != avoid), "")

    def subscribed(
        self, name: str, incarnation: str, message: Subscribe, *, by_tcp: bool = True
    ) -> None:
        """Note a receiver; one that is not `by_tcp` may be a relay for receivers of this plane."""
        before = self._fetchers.pop(name, None)
        rate = before.rate if by_tcp and before is not None else inf
        where = message.host, message.serves, message.buckets
        self._fetchers[name] = _Fetcher(*where, by_tcp=by_tcp, rate=rate)
        if by_tcp and message.buckets is not None:
            log.info("chain of relays: %s", ", ".join(self.chain))

    def prepare(self, name: str, prepare: Prepare, now: float) -> Sequence[Settled]:
        return (Settled(name, self.complete(name, prepare)),)

    def complete(self, name: str, message: Prepare) -> Prepare:
        """Return `message` with the sources from which `name` fetches the version."""
        assert self.server.store is not None
        self.offer(message.slot, message.checksums, deltas=self.links_are_slow)
        names = list(chain := self.chain)
        before = source = names[names.index(name) - 1] if name in names[1:] else ""
        while source and source != name:
            source = self._fetchers[source].source if source in self._fetchers else ""
        before = "" if source == name else before  # which may wait for what `name` fetches now
        if fetcher := self._fetchers.get(name):
            fetcher.source = before
        sources = [chain[before] if before else self.buckets]
        if not before and (owners := self.server.store.manifest.owners):
            nowhere = BucketsAt(endpoint="", key=b"")
            sources += [self.parts.get(owner, nowhere) for owner in range(1, max(owners) + 1)]
        granted = [BucketsAt(endpoint=s.endpoint, key=grant(s.key)) for s in sources]
        return msgspec.structs.replace(message, sources=granted)

    def offer(self, slot: int, checksums: Sequence[int], *, deltas: bool) -> None:
        """Hand out our buckets of the version in `slot`, with deltas to the one before."""
        assert self.server.store is not None and self._arena is not None
        version = StoredVersion(slot, self._arena.slot(slot), checksums, set(self._absent))
        self.server.store.publish(version, deltas=self._deltas and deltas)

    def staged(self, name: str, message: Ready) -> None:
        """Measure the rate of a link over which all bytes of a version travelled."""
        if (fetcher := self._fetchers.get(name)) is None:
            return
        if message.source_lost and (relay := fetcher.source):
            # Until it subscribes again; the one who has lost the hub has lost no relay.
            if lost := self._fetchers.get(relay):
                lost.serves, lost.buckets = "", None
            log.warning("%s has lost %s, which leaves the chain", name, relay)
        nbytes = self.server.store.manifest.total_bytes if self.server.store is not None else 0
        if fetcher.by_tcp and message.wire_s > 0 and message.wire_bytes >= nbytes:
            fetcher.rate = message.wire_bytes / message.wire_s

    @property
    def links_are_slow(self) -> bool:
        return self._always or any(one.rate < FAST_LINK for one in self._fetchers.values())

    def left(self, name: str) -> None:
        self._fetchers.pop(name, None)

    def granted(self, slot: int) -> None:
        if self.server.store is not None:
            self.server.store.withdraw(slot)

    def close(self) -> None:
        self.server.close()
