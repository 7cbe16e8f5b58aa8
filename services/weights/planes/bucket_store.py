"""The buckets that a hub or a relay can hand out, by content, and the encoder of their deltas."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.errors import ends_process
from umbra.proto.records import Manifest
from umbra.services.weights import delta
from umbra.services.weights.manifest import item_bytes
from umbra.services.weights.memory import copy, private_memory
from umbra.services.weights.planes.bucket_wire import Piece

ENCODED_TOGETHER = 8  # deltas for which senders are woken
THREADS = 4  # of the encoder, at most
LONGEST_PAUSE = 16  # versions for which a bucket whose deltas do not pay is not tried again
DELTA_SHARE = 0.5  # of a bucket's size: deltas that are larger together do not pay

Part = tuple[Piece, bytes | memoryview]
"""A piece and its bytes."""


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
    """Versions in their slots, and the deltas between consecutive ones. Thread-safe.

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
        """Hand out the version in `slot`, whose contents these are, but for `absent` buckets."""
        with self._lock:
            self._slots[slot] = _ServedSlot(data, contents, set(absent))
        self._notify()

    def holds(self, slot: int, contents: Sequence[int]) -> bool:
        """Return whether `slot` was offered with these contents."""
        with self._lock:
            return slot in self._slots and self._slots[slot].contents == contents

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
        """Have nobody wait for deltas of `buckets` any more."""
        with self._lock:
            self._encoding.difference_update(buckets)
        self._notify()

    def parts(
        self, bucket: int, content: int, bases: Sequence[int], part_bytes: int
    ) -> Iterable[Part] | None:
        """Return what to send to a receiver that wants `content` of `bucket` and holds `bases`.

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


@dataclass(slots=True)
class _EncodingJob:
    data: memoryview
    contents: Sequence[int]
    todo: list[int]  # last first
    cancelled: threading.Event = field(default_factory=threading.Event)
    workers: list[Future[None]] = field(default_factory=list["Future[None]"])


class DeltaEncoder:
    """Makes the deltas between consecutive versions, in threads of its own.

    It keeps a private copy of the last version (its slot is soon overwritten), bucket by bucket, so
    that a version that is overtaken while it is encoded leaves every bucket well defined.

    Args:
        store: receives them.
        manifest: the layout. Of buckets that others hold neither copies nor deltas are made: their
            content is 0 in what `start` is given.
    """

    def __init__(self, store: BucketStore, manifest: Manifest) -> None:
        self._store = store
        self._buckets = manifest.buckets
        self._items = item_bytes(manifest)
        self._last = private_memory(manifest.total_bytes, touched=not manifest.owners)
        self._held = [0] * len(manifest.buckets)  # contents of `_last`
        self._pauses = [(0, 0)] * len(manifest.buckets)  # versions left, and how many the next time
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="umbra-delta")
        self._job: _EncodingJob | None = None

    def start(self, data: memoryview, contents: Sequence[int]) -> None:
        """Encode the version in `data`, which must stay as it is until `stop` or the end."""
        self.stop()
        todo = [i for i, held in enumerate(self._held) if held != contents[i]]
        self._store.encode_later(todo)
        self._job = _EncodingJob(data, contents, todo[::-1])
        # Receivers wait for these deltas: a thread that fails must not leave them waiting.
        work = ends_process(self._work, "the encoder of deltas")
        self._job.workers = [self._executor.submit(work, self._job) for _ in range(self._threads)]

    def stop(self) -> None:
        """End the encoding under way, within the time that a bucket takes."""
        if (job := self._job) is None:
            return
        job.cancelled.set()
        for worker in job.workers:
            worker.result()
        self._store.not_encoded(job.todo)
        self._job = None

    def join(self) -> None:
        for worker in self._job.workers if self._job else ():
            worker.result()

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
        start, end = self._buckets[bucket]
        old, new = self._last[start:end], job.data[start:end]
        base, content = self._held[bucket], job.contents[bucket]
        left, longest = self._pauses[bucket]
        made: Delta | None = None
        if left:
            self._pauses[bucket] = (left - 1, longest)
        elif base:
            limit = int((end - start) * DELTA_SHARE)
            data = delta.advance(old, new, self._items[bucket], limit, compressor)
            if data is not None:
                made = Delta(base, content, data)
                self._pauses[bucket] = (0, 0)
            else:
                longest = min(LONGEST_PAUSE, 2 * longest or 1)
                self._pauses[bucket] = (longest, longest)
        if made is None:
            copy(new, old)
        self._held[bucket] = content
        return made
