"""One bucket after the other, in order, each in the same memory: a version that is not kept."""

from __future__ import annotations

from collections.abc import Sequence

from umbra.proto.errors import WireError
from umbra.proto.messages import FetchBuckets
from umbra.proto.records import Manifest, Piece
from umbra.services.runtime.weights.assembly import FAILURES
from umbra.services.runtime.weights.manifest import checksum
from umbra.services.runtime.weights.memory import private_memory


class SequentialAssembly:
    """Puts each bucket of a version together where the one before it was.

    A bucket that comes wrong is ordered again, and all that follow it with it: whoever loads them
    needs them in order.

    Args:
        manifest: the layout.
        wanted: content of every bucket.
    """

    def __init__(self, manifest: Manifest, wanted: Sequence[int]) -> None:
        self._manifest = manifest
        self._wanted = wanted
        self._memory = private_memory(max(end - start for start, end in manifest.buckets))
        self._next = 0
        self._filled = 0
        self._failures = 0
        self._ordered = False

    @property
    def missing(self) -> range:
        """Buckets that have not come yet."""
        return range(self._next, len(self._wanted))

    @property
    def awaited(self) -> range:
        """Those of them that are ordered."""
        return self.missing if self._ordered else range(0)

    def bucket(self, index: int) -> memoryview:
        """The memory of bucket `index`; good while it is the one that was completed last."""
        start, end = self._manifest.buckets[index]
        return self._memory[: end - start]

    def order(self, number: int, frame_bytes: int, credit_bytes: int) -> FetchBuckets:
        """A request for all that is missing, whole: there is no base for a delta here."""
        self._ordered, self._filled = True, 0
        return FetchBuckets(
            number=number,
            wanted=list(self.missing),
            contents=list(self._wanted[self._next :]),
            bases=[],
            frame_bytes=frame_bytes,
            credit_bytes=credit_bytes,
        )

    def take(self, piece: Piece, raw: bytes | memoryview) -> bool:
        """Add a piece; True when it completes its bucket.

        Raises:
            WireError: it is not the next one, or a bucket has come wrong too often.
        """
        if not self._ordered:
            return False  # what follows a bucket that was bad
        until = piece.offset + len(raw)
        area = self.bucket(piece.bucket) if piece.bucket == self._next else memoryview(b"")
        if piece.base or piece.offset != self._filled or until > len(area) or not raw:
            raise WireError(
                f"piece [{piece.offset}, {until}) of bucket {piece.bucket} is out of order"
            )
        area[piece.offset : until] = raw
        self._filled = until
        if until < len(area):
            return False
        if checksum(area) != self._wanted[self._next]:
            return self._failed()
        self._next += 1
        self._filled = self._failures = 0
        return True

    def _failed(self) -> bool:
        self._failures += 1
        self._ordered = False
        if self._failures >= FAILURES:
            start, end = self._manifest.buckets[self._next]
            raise WireError(
                f"checksum of bucket {self._next} [{start}, {end}) is wrong, again and again"
            )
        return False
