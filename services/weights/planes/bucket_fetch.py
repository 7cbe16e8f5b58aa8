"""Fetches buckets from their sources, over connections that are kept between versions."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from umbra.proto.errors import PeerLostError, WireError
from umbra.proto.records import BucketsAt, Manifest
from umbra.services.weights import delta
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.memory import copy, keep_freed_memory
from umbra.services.weights.planes.bucket_wire import (
    LOOK_S,
    ORDER,
    REFUSED,
    WAIT,
    BucketOrder,
    Piece,
    Records,
)

FAILURES = 3  # of one bucket until a version is given up


@dataclass(slots=True)
class Holdings:
    """A receiver's buffers, and the content of each bucket in each (0: unknown)."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    contents: list[list[int]] = field(default_factory=list[list[int]])

    def __post_init__(self) -> None:
        self.contents = [[0] * len(self.manifest.buckets) for _ in self.buffers]


class Assembly:
    """One version on its way into buffer `target`.

    Args:
        holdings: the buckets held, kept from version to version.
        target: index of the buffer.
        wanted: content of every bucket.
        deltas: whether deltas can be decoded here.
        buckets: the ones to assemble; the others are another assembly's. None = all.
    """

    def __init__(
        self,
        holdings: Holdings,
        target: int,
        wanted: Sequence[int],
        *,
        deltas: bool,
        buckets: Iterable[int] | None = None,
    ) -> None:
        self.manifest = holdings.manifest
        self.corrupted = 0  # buckets that came with a wrong checksum
        self._buffers = holdings.buffers
        self._contents = holdings.contents
        self._target = target
        self._wanted = wanted
        self._deltas = deltas
        self._filled = [0] * len(wanted)
        self._failures = [0] * len(wanted)
        # In the target as far as we know: differs from `_contents` within a chain of deltas.
        self._now = list(holdings.contents[target])
        about = range(len(wanted)) if buckets is None else buckets
        self.missing = {bucket for bucket in about if not self._have(bucket)}
        self.awaited: set[int] = set()  # ordered and neither complete nor failed

    def order(self, frame_bytes: int) -> BucketOrder:
        wanted = sorted(self.missing)
        self.awaited = set(wanted)
        for bucket in wanted:
            self._filled[bucket] = 0
            self._now[bucket] = self._contents[self._target][bucket]
        bases = [
            [0 if self._failures[bucket] else contents[bucket] for bucket in wanted]
            for contents in self._contents
        ]
        return BucketOrder(
            wanted=wanted,
            contents=[self._wanted[bucket] for bucket in wanted],
            bases=[held for held in bases if self._deltas and any(held)],
            frame_bytes=frame_bytes,
        )

    def room(self, piece: Piece, nbytes: int) -> memoryview | None:
        """Return the memory for a bucket's next bytes; None for a delta, or a bucket not awaited.

        They may be written there at once; then `placed` is called.

        Raises:
            WireError: they are not the next ones.
        """
        bucket = piece.bucket
        if piece.base or bucket not in self.awaited:
            return None  # a repetition, or what follows a piece that was bad
        start, end = self.manifest.buckets[bucket]
        until = piece.offset + nbytes
        if piece.offset != self._filled[bucket] or until > end - start or not nbytes:
            raise WireError(f"piece [{piece.offset}, {until}) of bucket {bucket} is out of order")
        self._contents[self._target][bucket] = 0
        return self._buffers[self._target][start + piece.offset : start + until]

    def placed(self, piece: Piece, nbytes: int) -> bool:
        """Note that a piece's bytes are where `room` said; return True if its bucket is complete.

        Raises:
            WireError: the bucket has come wrong too often.
        """
        bucket = piece.bucket
        start, end = self.manifest.buckets[bucket]
        self._filled[bucket] += nbytes
        if self._filled[bucket] < end - start:
            return False
        return self._complete(bucket, checksum(self._buffers[self._target][start:end]))

    def take(self, piece: Piece, raw: bytes | memoryview) -> bool:
        """Add a piece that lies elsewhere; True when it completes its bucket.

        Raises:
            WireError: it does not belong here, or a bucket has come wrong too often.
        """
        bucket = piece.bucket
        if not piece.base:
            if (room := self.room(piece, len(raw))) is None:
                return False
            copy(raw, room)
            return self.placed(piece, len(raw))
        if bucket not in self.awaited:
            return False
        start, end = self.manifest.buckets[bucket]
        area = self._buffers[self._target][start:end]
        try:
            self._apply(piece, raw, area)
        except WireError:
            return self._failed(bucket)
        if piece.result != self._wanted[bucket]:
            return False
        return self._complete(bucket, checksum(area))

    def _complete(self, bucket: int, actual: int) -> bool:
        """Check a bucket that is in the target with checksum `actual`."""
        if actual != self._wanted[bucket]:
            return self._failed(bucket)
        self._contents[self._target][bucket] = self._wanted[bucket]
        self.awaited.discard(bucket)
        self.missing.discard(bucket)
        return True

    def _have(self, bucket: int) -> bool:
        """Return whether the target holds the wanted content, or gets it from another buffer."""
        start, end = self.manifest.buckets[bucket]
        wanted = self._wanted[bucket]
        area = self._buffers[self._target][start:end]
        order = sorted(range(len(self._buffers)), key=lambda index: index != self._target)
        for index in order:
            if self._contents[index][bucket] != wanted:
                continue
            if index != self._target:
                self._contents[self._target][bucket] = 0
                copy(self._buffers[index][start:end], area)
            if checksum(area) == wanted:
                self._contents[self._target][bucket] = wanted
                return True
            self._contents[index][bucket] = 0
        return False

    def _apply(self, piece: Piece, raw: bytes | memoryview, area: memoryview) -> None:
        bucket = piece.bucket
        if self._now[bucket] != piece.base:
            start, end = self.manifest.buckets[bucket]
            for held, buffer in zip(self._contents, self._buffers, strict=True):
                if held[bucket] == piece.base:
                    copy(buffer[start:end], area)
                    break
            else:
                raise WireError(f"a delta of bucket {bucket} from a base that is not held")
        self._contents[self._target][bucket] = 0
        self._now[bucket] = 0
        delta.apply(raw, area)
        self._now[bucket] = piece.result

    def _failed(self, bucket: int) -> bool:
        """Note a wrong bucket: it is ordered again, without a delta."""
        self.corrupted += 1
        self._failures[bucket] += 1
        self.awaited.discard(bucket)
        self._contents[self._target][bucket] = 0
        if self._failures[bucket] >= FAILURES:
            raise WireError(f"{wrong_checksum(self.manifest, bucket)}, {FAILURES} times")
        return False


CONNECT_S = 2.0
LOST_S = 2.0  # nobody listens: the source is gone
STILL_S = 15.0  # connected, but not a byte came: it is gone as well, or stopped
SILENT_S = 60.0  # it is there, but no bucket came
RETRY_S = 0.1
# Connections in a row that break before a bucket has come, or malformed records, until a version is
# given up.
SPOILED = 3

DeltaCame = Callable[[Piece, bytes], None]

log = logging.getLogger(__name__)


class SourceLostError(PeerLostError):
    """Nobody answers where the buckets should come from."""


class StoppedError(Exception):
    """The version was given up."""


class BucketSource:
    """A connection to one source after another. For one thread at a time."""

    def __init__(self, *, sealed: bool = False) -> None:
        keep_freed_memory()
        self.at = BucketsAt(endpoint="", key=b"")
        self._sealed = sealed
        self._records: Records | None = None
        self._stopping = threading.Event()

    def use(self, at: BucketsAt) -> None:
        if at.endpoint != self.at.endpoint:
            self.close()
        self.at = at

    def connected(self, stopping: threading.Event) -> Records:
        """Return the connection, which is made now if there is none.

        Raises:
            SourceLostError: nobody answers.
            OSError: the source refuses us, or the connection broke.
        """
        self._stopping = stopping
        if self._records is None:
            records = self._records = Records(self._connect(), self._idle)
            records.begin(self.at.key, sealed=self._sealed)
        self._records.last_bytes_at = time.monotonic()
        return self._records

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


class Transfer:
    """A fetcher of the buckets that an assembly lacks.

    Args:
        delta_came: called with each delta of a bucket, once the bucket is right.
    """

    def __init__(
        self,
        source: BucketSource,
        assembly: Assembly,
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
    ) -> None:
        self.assembly = assembly
        self.stage_s = 0.0
        self.wire_bytes = 0
        self._source = source
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._chain: list[tuple[Piece, memoryview]] = []  # deltas of the bucket that comes now
        self._came_at = 0.0
        self._broken = 0  # connections since the last bucket

    def run(self, complete: Callable[[int], object], stopping: threading.Event) -> None:
        """Fetch until nothing is missing, or until `stopping` is set.

        Args:
            complete: called with each bucket that is there and verified.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends malformed data, or nothing, or refuses.
        """
        spoiled, self._came_at = 0, time.monotonic()
        while self.assembly.missing:
            problem: Exception
            try:
                records = self._source.connected(stopping)
                self._chain.clear()
                order = msgspec.msgpack.encode(self.assembly.order(self._frame_bytes))
                records.send(Piece(ORDER), order)
                records.flush()
                while self.assembly.awaited:
                    if stopping.is_set():
                        raise StoppedError
                    self._next(records, complete)
                if self.assembly.missing:
                    # What came wrong is ordered again, on a connection with nothing else on it.
                    self._source.close()
                continue
            except StoppedError:
                self._source.close()
                return
            except SourceLostError:
                self._source.close()
                raise
            except WireError as error:
                problem, spoiled = error, spoiled + 1
            except OSError as error:
                problem, self._broken = error, self._broken + 1
            self._source.close()
            log.info("%s: %s", self._source.at.endpoint, problem)
            if SPOILED in (self._broken, spoiled):
                raise WireError(f"{self._source.at.endpoint}: {problem}") from problem
            stopping.wait(RETRY_S)

    def _next(self, records: Records, complete: Callable[[int], object]) -> None:
        piece, data, placed = records.next(self.assembly.room)
        if piece.bucket == REFUSED:
            raise WireError(f"the source refuses: {bytes(data).decode(errors='replace')}")
        began = time.monotonic()
        if piece.bucket == WAIT:
            if began - self._came_at > SILENT_S:
                raise WireError(f"no bucket came within {SILENT_S:g} s")
            return
        self._came_at = began
        self.wire_bytes += len(data)
        if self._chain and self._chain[-1][0].bucket != piece.bucket:
            self._chain.clear()
        if piece.base:
            self._chain.append((piece, data))
        take = self.assembly.placed(piece, len(data)) if placed else self.assembly.take(piece, data)
        self.stage_s += time.monotonic() - began
        if not take:
            return
        self._broken = 0
        if self._delta_came is not None:
            for link, content in self._chain:
                self._delta_came(link, bytes(content))
        complete(piece.bucket)


def run_together(transfers: Sequence[Transfer]) -> Iterator[int | None]:
    """Run transfers at the same time, each on a thread of its own.

    Yields each bucket that is complete and verified, and None while none is. When it is closed,
    nothing is written any more.

    Raises:
        SourceLostError: one of the sources is gone.
        WireError: one of them sends malformed data, or nothing.
    """
    came: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()  # None: one is done
    stopping = threading.Event()

    def work(transfer: Transfer) -> None:
        try:
            transfer.run(came.put, stopping)
            came.put(None)
        except BaseException as error:  # noqa: BLE001 - raised below
            came.put(error)

    threads = [
        threading.Thread(target=work, args=(transfer,), name="umbra-fetch", daemon=True)
        for transfer in transfers
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
