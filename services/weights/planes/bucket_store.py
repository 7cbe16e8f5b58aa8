"""The buckets that a hub or a relay can hand out, by their contents, and who is still to get which.

A store is shared between threads, an outbox belongs to one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from umbra.proto.access import RAW_BYTES
from umbra.proto.errors import WireError
from umbra.proto.messages import Buckets, Credit, FetchBuckets
from umbra.proto.records import Manifest, Piece

ENCODED_TOGETHER = 8  # small deltas share a message
DELTA_SHARE = 0.5  # of a bucket's size: deltas that are larger together do not pay
SMALLEST_FRAME = 1 << 10
LARGEST_FRAME = RAW_BYTES
MOST_CREDIT = 8 * LARGEST_FRAME  # bytes under way to one receiver
ORDERS = 4096  # receivers at a time
PIECES = 1024  # in one message


@dataclass(frozen=True, slots=True)
class Part:
    """A piece and its raw frame."""

    piece: Piece
    raw: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Delta:
    """How a bucket of content `base` becomes one of content `result`."""

    base: int
    result: int
    data: bytes


@dataclass(slots=True)
class _ServedSlot:
    data: memoryview
    contents: Sequence[int]
    absent: set[int]  # buckets that have not arrived, or that another host has


class BucketStore:
    """Versions in their slots, and the deltas that lead from bucket to bucket.

    Args:
        manifest: the layout of every version.
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
        """`slot` holds a version of these contents, but for the buckets that are `absent`."""
        with self._lock:
            self._slots[slot] = _ServedSlot(data, contents, set(absent))
        self._notify()

    def holds(self, slot: int, contents: Sequence[int]) -> bool:
        """Whether `slot` was offered with these contents."""
        with self._lock:
            return slot in self._slots and self._slots[slot].contents == contents

    def withdraw(self, slot: int) -> None:
        """`slot` is written anew."""
        with self._lock:
            self._slots.pop(slot, None)

    def arrived(self, slot: int, bucket: int) -> None:
        """A bucket of the version in `slot` is complete and verified."""
        with self._lock:
            if slot in self._slots:
                self._slots[slot].absent.discard(bucket)
        self._notify()

    def encode_later(self, buckets: Iterable[int]) -> None:
        """Deltas of `buckets` are on their way: those who have a base should wait for them."""
        with self._lock:
            self._encoding.update(buckets)

    def encoded(self, bucket: int, delta: Delta | None) -> None:
        """The delta of `bucket`, or none because it would not be smaller."""
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
        """There will be no deltas of `buckets` that lead to the newest version."""
        with self._lock:
            self._encoding.difference_update(buckets)
        self._notify()

    def parts(
        self, bucket: int, content: int, bases: Sequence[int], part_bytes: int
    ) -> Iterable[Part] | None:
        """What to send to one that wants `bucket` as `content` and holds it as `bases`.

        Returns None while there is nothing to send, or nothing good yet. The parts of a bucket are
        made one by one: small ones are many.
        """
        with self._lock:
            if any(bases):
                chain = self._chain(bucket, content, bases)
                if chain is not None:
                    return [
                        Part(Piece(bucket=bucket, result=link.result, base=link.base), link.data)
                        for link in chain
                    ]
                if bucket in self._encoding:
                    return None
            data = self._dense(bucket, content)
        if data is None:
            return None
        return (
            Part(
                Piece(bucket=bucket, result=content, offset=offset),
                data[offset : offset + part_bytes],
            )
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


Find = Callable[[int, int, Sequence[int], int], Iterable[Part] | None]


@dataclass(slots=True)
class _BucketRequest:
    message: FetchBuckets  # as it came: tuples of its numbers would cost several times as much
    credit: int
    at: int = 0  # how many of its buckets are begun
    parts: Iterator[Part] = field(
        default_factory=lambda: iter(())
    )  # of the last of them, made as they are sent
    part: Part | None = None  # the next one

    @property
    def is_done(self) -> bool:
        return self.part is None and self.at == len(self.message.wanted)


class Outbox:
    """Orders of all receivers, filled bucket by bucket within their credit.

    Args:
        buckets: how many a version has.
        find: gives the parts of a bucket, as `BucketStore.parts`; None while there are none.
    """

    def __init__(self, buckets: int, find: Find) -> None:
        self._buckets = buckets
        self._find = find
        self._orders: dict[bytes, _BucketRequest] = {}

    @property
    def open(self) -> list[bytes]:
        """Who waits for something."""
        return list(self._orders)

    def order(self, receiver: bytes, message: FetchBuckets) -> None:
        """Take an order; it replaces the receiver's last.

        Raises:
            WireError: it makes no sense.
        """
        count = len(message.wanted)
        lists = [message.contents, *message.bases]
        if any(len(values) != count for values in lists):
            raise WireError("contents and bases must be as many as wanted", path="contents")
        if not all(0 <= bucket < self._buckets for bucket in message.wanted):
            raise WireError(f"there are {self._buckets} buckets", path="wanted")
        if not SMALLEST_FRAME <= message.frame_bytes <= LARGEST_FRAME:
            raise WireError(
                f"from {SMALLEST_FRAME} to {LARGEST_FRAME} bytes, not {message.frame_bytes}",
                path="frame_bytes",
            )
        if receiver not in self._orders and len(self._orders) >= ORDERS:
            raise WireError(f"{ORDERS} receivers fetch already", code="too_many")
        self._orders[receiver] = _BucketRequest(message, min(message.credit_bytes, MOST_CREDIT))

    def credit(self, receiver: bytes, message: Credit) -> None:
        """The receiver has used up what it was sent."""
        order = self._orders.get(receiver)
        if order is not None and order.message.number == message.number:
            order.credit = min(order.credit + max(message.credit_bytes, 0), MOST_CREDIT)

    def forget(self, receiver: bytes) -> None:
        """The receiver cannot be reached."""
        self._orders.pop(receiver, None)

    def next(self, receiver: bytes) -> tuple[Buckets, list[bytes | memoryview]] | None:
        """The next message to `receiver` with its raw frames; None if there is none for now.

        It has at most `frame_bytes` raw bytes, unless a single delta has more. Credit may be
        overdrawn by one message.
        """
        order = self._orders.get(receiver)
        if order is None or order.credit <= 0:
            return None
        taken: list[Part] = []
        size = 0
        while len(taken) < PIECES:
            part = self._peek(order)
            if part is None or (taken and size + len(part.raw) > order.message.frame_bytes):
                break
            taken.append(part)
            size += len(part.raw)
            order.part = next(order.parts, None)
        if order.is_done:
            del self._orders[receiver]
        if not taken:
            return None
        order.credit -= size
        pieces = [part.piece for part in taken]
        return Buckets(number=order.message.number, pieces=pieces), [part.raw for part in taken]

    def _peek(self, order: _BucketRequest) -> Part | None:
        """What comes next; None while there is nothing to send."""
        message = order.message
        while order.part is None and order.at < len(message.wanted):
            bases = [copy[order.at] for copy in message.bases]
            bucket, content = message.wanted[order.at], message.contents[order.at]
            parts = self._find(bucket, content, bases, message.frame_bytes)
            if parts is None:
                return None
            order.at += 1
            order.parts = iter(parts)
            order.part = next(order.parts, None)
        return order.part
