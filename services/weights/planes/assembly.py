"""Puts a version together out of pieces. No socket, no thread.

Every bucket is known by its content (xxh3-64), here as on the wire. What a buffer already holds of
a version, from an attempt that broke off or because it has not changed, is not fetched again, and
serves as the base of deltas. Whatever the way it came, a bucket counts only after the checksum over
its own bytes is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from umbra.proto.errors import WireError
from umbra.proto.records import Manifest
from umbra.services.weights import delta
from umbra.services.weights.manifest import checksum, wrong_checksum
from umbra.services.weights.memory import copy
from umbra.services.weights.planes.bucket_wire import BucketOrder, Piece

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
        holdings: what there is, kept from version to version.
        target: index of the buffer.
        wanted: content of every bucket.
        deltas: whether deltas can be decoded here.
        buckets: those that it is about; the others are another assembly's. None = all.
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
        """Return an order for all that is missing."""
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
        """Where the next bytes of a bucket belong; None for a delta, or where nothing is awaited.

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
        """The bytes of a piece are where `room` said; True when they complete its bucket.

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
            raise WireError(f"{wrong_checksum(self.manifest, bucket)}, again and again")
        return False
