"""Plane `tcp`, the receiver's side: fetches the buckets that it lacks, and keeps connections."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from umbra.proto.errors import PeerLostError, WireError
from umbra.proto.messages import Prepare
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import BucketsAt, Manifest
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights import delta
from umbra.services.weights.manifest import checksum, owned_buckets, wrong_checksum
from umbra.services.weights.memory import copy, keep_freed_memory
from umbra.services.weights.planes.bucket_wire import (
    LOOK_S,
    ORDER,
    REFUSED,
    WAIT,
    BucketOrder,
    Part,
    Piece,
    Records,
)
from umbra.services.weights.planes.plane import Receipt, Receiving

CONNECT_S = 2.0
LOST_S = 2.0  # nobody listens: the source is gone
STILL_S = 15.0  # connected, but not a byte came: it is gone as well, or stopped
SILENT_S = 60.0  # it is there, but no bucket came
RETRY_S = 0.1  # between two tries to connect

DeltaCame = Callable[[int, Part], object]

log = logging.getLogger(__name__)


class Holdings:
    """A receiver's buffers, and the content of each bucket in each (0: unknown)."""

    def __init__(self, manifest: Manifest, buffers: Sequence[memoryview]) -> None:
        self.manifest = manifest
        self.buffers = buffers
        self.contents = [[0] * len(manifest.buckets) for _ in buffers]

    def area(self, index: int, bucket: int) -> memoryview:
        start, end = self.manifest.buckets[bucket]
        return self.buffers[index][start:end]


class Assembly:
    """One version on its way into buffer `target`.

    Args:
        wanted: content of every bucket.
        buckets: the ones to assemble; the others are another assembly's. None = all.
    """

    def __init__(
        self,
        holdings: Holdings,
        target: int,
        wanted: Sequence[int],
        buckets: Iterable[int] | None = None,
    ) -> None:
        self.stage_s = 0.0
        self.wire_bytes = 0
        self._holdings = holdings
        self._target = target
        # Within a chain of deltas the result of a link, unchecked: the end of the chain is checked.
        self._contents = holdings.contents[target]
        self._wanted = wanted
        self._filled: Counter[int] = Counter()  # bytes of a bucket that comes whole
        about = range(len(wanted)) if buckets is None else buckets
        self.missing = {bucket for bucket in about if not self._have(bucket)}

    def order(self, frame_bytes: int) -> BucketOrder:
        wanted = sorted(self.missing)
        self._filled.clear()
        bases = [[contents[bucket] for bucket in wanted] for contents in self._holdings.contents]
        return BucketOrder(
            wanted=wanted,
            contents=[self._wanted[bucket] for bucket in wanted],
            bases=[held for held in bases if any(held)],
            frame_bytes=frame_bytes,
        )

    def room(self, piece: Piece, nbytes: int) -> memoryview | None:
        """Return the memory for a bucket's next bytes; None for a delta, or a bucket not missing.

        Raises:
            WireError: they are not the next ones.
        """
        bucket = piece.bucket
        if piece.base or bucket not in self.missing:
            return None
        area, until = self._holdings.area(self._target, bucket), piece.offset + nbytes
        if piece.offset != self._filled[bucket] or until > len(area) or not nbytes:
            raise WireError(f"piece [{piece.offset}, {until}) of bucket {bucket} is out of order")
        self._contents[bucket] = 0
        return area[piece.offset : until]

    def take(self, piece: Piece, raw: bytes | memoryview) -> bool:
        """Add a delta, or bytes that are where `room` said; True if they complete the bucket.

        Raises:
            WireError: the bucket is wrong; the next order has it whole, and not as a delta.
        """
        bucket = piece.bucket
        if bucket not in self.missing:
            return False
        try:
            if not self._add(piece, raw, self._holdings.area(self._target, bucket)):
                return False
        except WireError:
            for contents in self._holdings.contents:
                contents[bucket] = 0
            raise
        self._contents[bucket] = self._wanted[bucket]
        self.missing.discard(bucket)
        return True

    def _add(self, piece: Piece, raw: bytes | memoryview, area: memoryview) -> bool:
        """Add a piece; True if its bucket is complete, WireError if it is wrong."""
        if piece.base:
            self._apply(piece, raw, area)
            if piece.result != self._wanted[piece.bucket]:
                return False
        else:
            self._filled[piece.bucket] += len(raw)
            if self._filled[piece.bucket] < len(area):
                return False
        if checksum(area) != self._wanted[piece.bucket]:
            raise WireError(wrong_checksum(self._holdings.manifest, piece.bucket))
        return True

    def _have(self, bucket: int) -> bool:
        """Return whether the target holds the wanted content, or gets it from another buffer."""
        held, wanted = self._holdings, self._wanted[bucket]
        area = held.area(self._target, bucket)
        for index in sorted(range(len(held.buffers)), key=lambda index: index != self._target):
            if held.contents[index][bucket] != wanted:
                continue
            if index != self._target:
                self._contents[bucket] = 0
                copy(held.area(index, bucket), area)
            if checksum(area) == wanted:
                self._contents[bucket] = wanted
                return True
            held.contents[index][bucket] = 0
        return False

    def _apply(self, piece: Piece, raw: bytes | memoryview, area: memoryview) -> None:
        bucket, held = piece.bucket, self._holdings
        if self._contents[bucket] != piece.base:
            holders = (i for i, known in enumerate(held.contents) if known[bucket] == piece.base)
            if (index := next(holders, None)) is None:
                raise WireError(f"a delta of bucket {bucket} from a base that is not held")
            copy(held.area(index, bucket), area)
        self._contents[bucket] = 0
        delta.apply(raw, area)
        self._contents[bucket] = piece.result


class SourceLostError(PeerLostError):
    """Nobody answers where the buckets should come from."""


class StoppedError(Exception):
    """The version was given up."""


class BucketSource:
    """A connection to one source after another. For one thread at a time.

    Args:
        frame_bytes: of a bucket, at most, in one record.
        delta_came: called with a bucket and each delta of it, once the bucket is right.
    """

    def __init__(
        self, frame_bytes: int, delta_came: DeltaCame | None = None, *, sealed: bool = False
    ) -> None:
        keep_freed_memory()
        self.at = BucketsAt(endpoint="", key=b"")
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._sealed = sealed
        self._records: Records | None = None
        self._stopping = threading.Event()
        self._came_at = 0.0  # when a piece came

    def use(self, at: BucketsAt) -> None:
        if at.endpoint != self.at.endpoint:
            self.close()
        self.at = at

    def fetch(
        self, assembly: Assembly, complete: Callable[[int], object], stopping: threading.Event
    ) -> None:
        """Fetch until `assembly` lacks nothing, or until `stopping` is set.

        Args:
            complete: called with each bucket that is there and verified.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends wrong data, or nothing, or refuses.
        """
        self._stopping, self._came_at = stopping, time.monotonic()
        while assembly.missing:
            has_come = self._records is not None  # for a version before: it may have ended since
            try:
                for bucket in self._ordered(assembly):
                    has_come = True
                    complete(bucket)
            except StoppedError:
                self.close()
                return
            except SourceLostError:
                self.close()
                raise
            except (OSError, WireError) as error:
                self.close()
                if isinstance(error, WireError) or not has_come:
                    raise WireError(f"{self.at.endpoint}: {error}") from error
                log.info("%s: %s", self.at.endpoint, error)

    def _ordered(self, assembly: Assembly) -> Iterator[int]:
        """Order the missing buckets; yield each once it is complete."""
        if (records := self._records) is None:
            records = self._records = Records(self._connect(), self._idle)
            records.begin(self.at.key, sealed=self._sealed)
        records.last_bytes_at = time.monotonic()
        records.send(Piece(ORDER), msgspec.msgpack.encode(assembly.order(self._frame_bytes)))
        records.flush()
        chain: list[tuple[Piece, memoryview]] = []  # deltas of the bucket that comes now
        while assembly.missing:
            if self._stopping.is_set():
                raise StoppedError
            piece, data = records.next(assembly.room)
            if piece.bucket == REFUSED:
                raise WireError(f"the source refuses: {bytes(data).decode(errors='replace')}")
            began = time.monotonic()
            if piece.bucket == WAIT:
                if began - self._came_at > SILENT_S:
                    raise WireError(f"no bucket came within {SILENT_S:g} s")
                continue
            self._came_at = began
            assembly.wire_bytes += len(data)
            if chain and chain[-1][0].bucket != piece.bucket:
                chain.clear()
            if piece.base:
                chain.append((piece, data))
            is_complete = assembly.take(piece, data)
            assembly.stage_s += time.monotonic() - began
            if is_complete:
                if (delta_came := self._delta_came) is not None:
                    for link, content in chain:
                        delta_came(link.bucket, (link, bytes(content)))
                yield piece.bucket

    def _idle(self) -> None:
        if self._stopping.is_set():
            raise StoppedError
        assert self._records is not None
        if time.monotonic() - self._records.last_bytes_at > STILL_S:
            raise SourceLostError(f"{self.at.endpoint} is silent for {STILL_S:g} s")

    def _connect(self) -> socket.socket:
        began = time.monotonic()
        host, _, port = self.at.endpoint.removeprefix("tcp://").rpartition(":")
        while not self._stopping.is_set():
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
                connection.settimeout(None)  # reads of the kernel are bounded instead
                return connection
            except (OSError, ValueError) as error:
                if time.monotonic() - began > LOST_S:
                    raise SourceLostError(
                        f"{self.at.endpoint} is gone, or cannot be reached ({error}): open that "
                        "port, which is the one after weight_hub.listen if that names one"
                    ) from error
            self._stopping.wait(RETRY_S)
        raise StoppedError

    def close(self) -> None:
        records, self._records = self._records, None
        if records is not None:
            records.connection.close()


def fetch_together(fetches: Sequence[tuple[BucketSource, Assembly]]) -> Iterator[int | None]:
    """Fetch from all sources at the same time, from each on a thread of its own.

    Yields each bucket that is complete and verified, and None while none is. When it is closed,
    nothing is written any more.

    Raises:
        SourceLostError: one of the sources is gone.
        WireError: one of them sends malformed data, or nothing.
    """
    came: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()  # None: one is done
    stopping = threading.Event()

    def work(source: BucketSource, assembly: Assembly) -> None:
        try:
            source.fetch(assembly, came.put, stopping)
            came.put(None)
        except BaseException as error:  # noqa: BLE001 - raised below
            came.put(error)

    threads = [
        threading.Thread(target=work, args=fetch, name="umbra-fetch", daemon=True)
        for fetch in fetches
    ]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            try:
                step = came.get(timeout=LOOK_S)
            except queue.Empty:
                yield None
                continue
            if isinstance(step, BaseException):
                raise step
            left -= step is None
            if step is not None:
                yield step
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


class TcpReceiver:
    """A fetcher of versions by buckets, which goes on where it was when a connection breaks.

    Args:
        buffers: to be filled, `[manifest.total_bytes]` each.
        delta_came: called with a bucket and each delta of it, before it is yielded.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        config: WeightHubConfig,
        delta_came: DeltaCame | None = None,
        security: Security = OPEN,
    ) -> None:
        self.manifest = manifest
        self._holdings = Holdings(manifest, buffers)
        self._config = config
        self._delta_came = delta_came
        self._sealed = security.keys is not None
        self._sources: dict[tuple[int, int], BucketSource] = {}  # by owner, and connection

    def receive(self, message: Prepare, target: int = 0) -> Receiving:
        """Fetch missing buckets of a version into buffer `target`, of each owner from its source.

        Connection i of n to a source fetches buckets i, i+n, i+2n, ... of it.
        """
        began, count, sums = time.perf_counter(), self._config.connections, message.checksums
        several = len(message.sources) > 1
        owned = owned_buckets(self.manifest) if several else {0: range(len(sums))}
        assemblies = {
            (owner, connection): Assembly(self._holdings, target, sums, buckets[connection::count])
            for owner, buckets in owned.items()
            for connection in range(count)
        }
        stage_s = time.perf_counter() - began
        fetches: list[tuple[BucketSource, Assembly]] = []
        error, lost = "", False
        try:
            missing = {b for assembly in assemblies.values() for b in assembly.missing}
            yield from (bucket for bucket in range(len(sums)) if bucket not in missing)
            fetches = [
                (self._source(*place, message.sources), assembly)
                for place, assembly in assemblies.items()
                if assembly.missing
            ]
            yield from fetch_together(fetches)
        except (SourceLostError, WireError) as problem:
            error, lost = str(problem), isinstance(problem, SourceLostError)
        # They verified at the same time.
        stage_s += sum(assembly.stage_s for _, assembly in fetches) / max(1, len(fetches))
        wire_s = max(0.0, time.perf_counter() - began - stage_s)
        wire_bytes = sum(assembly.wire_bytes for _, assembly in fetches)
        data = self._holdings.buffers[target]
        return Receipt(wire_s, stage_s, wire_bytes, error, lost, data=data)

    def _source(self, owner: int, connection: int, sources: Sequence[BucketsAt]) -> BucketSource:
        if owner >= len(sources) or not sources[owner].endpoint:
            raise WireError(f"no source has the buckets of trainer host {owner}")
        if (source := self._sources.get((owner, connection))) is None:
            frame_bytes = self._config.receive_bucket_bytes
            source = BucketSource(frame_bytes, self._delta_came, sealed=self._sealed)
            self._sources[owner, connection] = source
        source.use(sources[owner])
        return source

    def overwritten(self, target: int) -> None:
        """Forget the contents of buffer `target`: a broadcast fills it."""
        self._holdings.contents[target][:] = [0] * len(self.manifest.buckets)

    def verify(self, target: int, checksums: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Check each bucket that a broadcast has filled; yields bucket and result."""
        for bucket, wanted in enumerate(checksums):
            right = checksum(self._holdings.area(target, bucket)) == wanted
            if right:
                self._holdings.contents[target][bucket] = wanted
            yield bucket, right

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
