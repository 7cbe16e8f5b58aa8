"""One version over a buckets socket: orders, credit, what came wrong, and a source that is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import zmq

from umbra.proto.codec import decode
from umbra.proto.errors import PeerLostError, WireError
from umbra.proto.messages import Buckets, Credit, FetchBuckets, Nack
from umbra.proto.records import Piece
from umbra.services.runtime.weights.bucket_source import BucketSource

LOOK_S = 0.05  # how soon an interruption is seen
LOST_S = 2.0  # without a connection: the source is gone
SILENT_S = 60.0  # connected, and yet nothing came
FRAMES_UNDER_WAY = 8
FRAMES_PER_CREDIT = 2
SPOILED = 3  # messages that cannot be decoded, until a version is given up

DeltaCame = Callable[[Piece, bytes], None]


class SourceLostError(PeerLostError):
    """Nobody answers where the buckets should come from."""


class Gathering(Protocol):
    """Puts the pieces of a version together."""

    @property
    def missing(self) -> Collection[int]:
        """Buckets that are not complete."""
        ...

    @property
    def awaited(self) -> Collection[int]:
        """Buckets that are ordered and neither complete nor failed."""
        ...

    def order(self, number: int, frame_bytes: int, credit_bytes: int) -> FetchBuckets:
        """A request for all that is missing."""
        ...

    def take(self, piece: Piece, raw: bytes | memoryview) -> bool:
        """Add a piece; True when it completes its bucket.

        Raises:
            WireError: it does not belong here, or a bucket has come wrong too often.
        """
        ...


class Transfer:
    """Fetches what a gathering lacks.

    Args:
        source: connected, or about to be.
        gathering: takes the pieces.
        frame_bytes: in one message, at most.
        delta_came: called with each delta of a bucket, once the bucket is right.
    """

    def __init__(
        self,
        source: BucketSource,
        gathering: Gathering,
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
    ) -> None:
        self.stage_s = 0.0
        self.wire_bytes = 0
        self._source = source
        self._gathering = gathering
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._number = 0
        self._used = 0  # bytes for which no new credit was given
        self._spoiled = 0

    def run(self, interrupted: Callable[[], bool]) -> Iterator[int]:
        """Fetch until nothing is missing; yields each bucket when it is complete and verified.

        No more than the credit comes while the caller works on a bucket.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends nonsense, or nothing.
            InterruptedError: nobody wants this version any longer.
        """
        now = time.monotonic()
        look_at = heard_at = connected_at = now
        if self._source.connected:
            self._order()
        while self._gathering.missing:
            frames, made = self._source.poll(LOOK_S)
            now = time.monotonic()
            if made:
                self._order()  # whatever was under way on the connection before is lost
            if frames is not None:
                yield from self._receive(frames)
                now = heard_at = time.monotonic()
            if self._source.connected:
                connected_at = now
            elif now - connected_at > LOST_S:
                raise SourceLostError(f"no connection for {LOST_S:g} s")
            if now - heard_at > SILENT_S:
                raise WireError(f"no bucket came within {SILENT_S:g} s")
            if now >= look_at:
                look_at = now + LOOK_S
                if interrupted():
                    raise InterruptedError("given up while it was fetched")

    def _order(self) -> None:
        self._number = self._source.next_number()
        self._used = 0
        frame = self._frame_bytes
        self._source.send(self._gathering.order(self._number, frame, FRAMES_UNDER_WAY * frame))

    def _receive(self, frames: list[zmq.Frame]) -> Iterator[int]:
        raw = [frame.buffer for frame in frames[2:]]
        size = sum(map(len, raw))
        self.wire_bytes += size
        try:
            body = decode([frame.bytes for frame in frames[:2]], raw=raw).body
        except WireError:
            self._spoiled += 1
            if self._spoiled >= SPOILED:
                raise
            self._order()
            return
        if isinstance(body, Nack):
            raise WireError(f"the source refuses: {body.reason}")
        if not isinstance(body, Buckets) or body.number != self._number:
            return  # of an order before
        chain: list[tuple[Piece, memoryview]] = []
        for piece, data in zip(body.pieces, raw, strict=True):
            if chain and chain[-1][0].bucket != piece.bucket:
                chain.clear()
            if piece.base:
                chain.append((piece, data))
            began = time.perf_counter()
            complete = self._gathering.take(piece, data)
            self.stage_s += time.perf_counter() - began
            if complete:
                if self._delta_came is not None:
                    for link, content in chain:
                        self._delta_came(link, bytes(content))
                yield piece.bucket
        self._used += size
        if self._used >= FRAMES_PER_CREDIT * self._frame_bytes:
            self._source.send(Credit(number=self._number, credit_bytes=self._used))
            self._used = 0
        if self._gathering.missing and not self._gathering.awaited:
            self._order()  # the buckets that came wrong
