"""What each receiver is still to be sent, and how much it may be sent now. No socket of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from umbra.proto.errors import WireError
from umbra.proto.messages import Buckets, Credit, FetchBuckets
from umbra.services.weight_hub.store import Part

LARGEST_FRAME = 64 << 20
PIECES = 1024  # in one message

Find = Callable[[int, int, Sequence[int], int], list[Part] | None]


@dataclass(slots=True)
class _Order:
    number: int
    credit: int
    frame_bytes: int
    wanted: deque[tuple[int, int, tuple[int, ...]]]  # bucket, content, bases
    parts: deque[Part] = field(default_factory=deque[Part])


class Outbox:
    """Orders of all receivers, filled bucket by bucket within their credit.

    Args:
        buckets: how many a version has.
        find: gives the parts of a bucket, as `BucketStore.parts`; None while there are none.
    """

    def __init__(self, buckets: int, find: Find) -> None:
        self._buckets = buckets
        self._find = find
        self._orders: dict[bytes, _Order] = {}

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
        if not 0 < message.frame_bytes <= LARGEST_FRAME:
            raise WireError(f"from 1 to {LARGEST_FRAME} bytes", path="frame_bytes")
        bases = zip(*message.bases, strict=True) if message.bases else [()] * count
        wanted = deque(zip(message.wanted, message.contents, bases, strict=True))
        self._orders[receiver] = _Order(
            message.number, message.credit_bytes, message.frame_bytes, wanted
        )

    def credit(self, receiver: bytes, message: Credit) -> None:
        """The receiver has used up what it was sent."""
        order = self._orders.get(receiver)
        if order is not None and order.number == message.number:
            order.credit += message.credit_bytes

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
            if not order.parts and not self._refill(order):
                break
            if taken and size + len(order.parts[0].raw) > order.frame_bytes:
                break
            taken.append(order.parts.popleft())
            size += len(taken[-1].raw)
        if not order.parts and not order.wanted:
            del self._orders[receiver]
        if not taken:
            return None
        order.credit -= size
        pieces = [part.piece for part in taken]
        return Buckets(number=order.number, pieces=pieces), [part.raw for part in taken]

    def _refill(self, order: _Order) -> bool:
        if not order.wanted:
            return False
        parts = self._find(*order.wanted[0], order.frame_bytes)
        if parts is None:
            return False
        order.wanted.popleft()
        order.parts.extend(parts)
        return True
