"""Fetches buckets from their sources, over connections that are kept between versions."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from umbra.proto.errors import PeerLostError, WireError
from umbra.proto.records import BucketsAt
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.assembly import Assembly
from umbra.services.weights.planes.bucket_wire import (
    LOOK_S,
    ORDER,
    REFUSED,
    WAIT,
    Piece,
    Records,
)

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
    """A connection to one source after another. For one thread at a time.

    Args:
        sealed: whether the run has keys.
    """

    def __init__(self, *, sealed: bool = False) -> None:
        keep_freed_memory()
        self.at = BucketsAt(endpoint="", key=b"")
        self._sealed = sealed
        self._records: Records | None = None
        self._stopping = threading.Event()

    def use(self, at: BucketsAt) -> None:
        """Fetch from there from now on."""
        if at.endpoint != self.at.endpoint:
            self.close()
        self.at = at

    def connected(self, stopping: threading.Event) -> Records:
        """Return the connection, which is made now if there is none.

        Raises:
            SourceLostError: nobody answers.
            OSError: the source refuses us, or the connection broke.
            StoppedError: `stopping` is set.
        """
        self._stopping = stopping
        if self._records is None:
            records = self._records = Records(self._connect(), self._idle)
            records.begin(self.at.key, sealed=self._sealed)
        self._records.heard_at = time.monotonic()
        return self._records

    def _idle(self) -> None:
        if self._stopping.is_set():
            raise StoppedError
        assert self._records is not None
        if time.monotonic() - self._records.heard_at > STILL_S:
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
    """Fetches what an assembly lacks.

    Args:
        source: to be fetched from.
        assembly: takes the pieces.
        frame_bytes: in one record, at most.
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
        """Take a record."""
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
