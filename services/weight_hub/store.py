"""The buckets that a hub or a relay can hand out, by their contents; shared between its threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from umbra.proto.records import Manifest, Piece

ENCODED_TOGETHER = 8  # small deltas share a message
DELTA_SHARE = 0.5  # of a bucket's size: deltas that are larger together do not pay


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
class _Slot:
    data: memoryview
    contents: Sequence[int]
    absent: set[int] = field(default_factory=set[int])  # buckets that have not arrived


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
        self._slots: dict[int, _Slot] = {}
        # By bucket; each delta starts where the one before it ends.
        self._deltas: list[deque[Delta]] = [deque() for _ in manifest.buckets]
        self._encoding: set[int] = set()

    def offer(
        self, slot: int, data: memoryview, contents: Sequence[int], *, arrived: bool = True
    ) -> None:
        """`slot` holds a version of these contents; without `arrived`, no bucket of it yet."""
        absent = set[int]() if arrived else set(range(len(contents)))
        with self._lock:
            self._slots[slot] = _Slot(data, contents, absent)
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
