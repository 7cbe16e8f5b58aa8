"""Makes the deltas between consecutive versions, in threads of its own.

It keeps a private copy of the last version (the slot that held it is soon written anew), bucket by
bucket, so that a version which is overtaken while it is encoded leaves every bucket well defined.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.errors import ends_process
from umbra.proto.records import Manifest
from umbra.services.weights import delta
from umbra.services.weights.manifest import item_bytes
from umbra.services.weights.memory import copy, private_memory
from umbra.services.weights.planes.bucket_store import DELTA_SHARE, BucketStore, Delta

THREADS = 4  # at most
LONGEST_PAUSE = 16  # versions for which a bucket whose deltas do not pay is not tried again


@dataclass(slots=True)
class _EncodingJob:
    data: memoryview
    contents: Sequence[int]
    todo: list[int]  # last first
    cancelled: threading.Event = field(default_factory=threading.Event)
    workers: list[Future[None]] = field(default_factory=list["Future[None]"])


class DeltaEncoder:
    """Feeds a store with deltas, version by version.

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
        """Wait until the version is encoded."""
        for worker in self._job.workers if self._job else ():
            worker.result()

    def close(self) -> None:
        """Stop, and end the threads."""
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
