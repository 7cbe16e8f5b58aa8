"""What each receiver is still to be sent, and how much it may be sent now. No socket of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from umbra.proto.errors import WireError
from umbra.proto.messages import Buckets, Credit, FetchBuckets
from umbra.proto.sizes import RAW_BYTES
from umbra.services.weight_hub.store import Part

SMALLEST_FRAME = 1 << 10
LARGEST_FRAME = RAW_BYTES
MOST_CREDIT = 8 * LARGEST_FRAME  # bytes under way to one receiver
ORDERS = 4096  # receivers at a time
PIECES = 1024  # in one message

Find = Callable[[int, int, Sequence[int], int], Iterable[Part] | None]


@dataclass(slots=True)
class _Order:
    message: FetchBuckets  # as it came: tuples of its numbers would cost several times as much
    credit: int
    at: int = 0  # how many of its buckets are begun
    parts: Iterator[Part] = field(
        default_factory=lambda: iter(())
    )  # of the last of them, made as they are sent
    part: Part | None = None  # the next one

    @property
    def is_done(self) -> bool:
        return self.part is None and self.at == len(self.message.wanted)


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
        if not SMALLEST_FRAME <= message.frame_bytes <= LARGEST_FRAME:
            raise WireError(
                f"from {SMALLEST_FRAME} to {LARGEST_FRAME} bytes, not {message.frame_bytes}",
                path="frame_bytes",
            )
        if receiver not in self._orders and len(self._orders) >= ORDERS:
            raise WireError(f"{ORDERS} receivers fetch already", code="too_many")
        self._orders[receiver] = _Order(message, min(message.credit_bytes, MOST_CREDIT))

    def credit(self, receiver: bytes, message: Credit) -> None:
        """The receiver has used up what it was sent."""
        order = self._orders.get(receiver)
        if order is not None and order.message.number == message.number:
            order.credit = min(order.credit + max(message.credit_bytes, 0), MOST_CREDIT)

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
            part = self._peek(order)
            if part is None or (taken and size + len(part.raw) > order.message.frame_bytes):
                break
            taken.append(part)
            size += len(part.raw)
            order.part = next(order.parts, None)
        if order.is_done:
            del self._orders[receiver]
        if not taken:
            return None
        order.credit -= size
        pieces = [part.piece for part in taken]
        return Buckets(number=order.message.number, pieces=pieces), [part.raw for part in taken]

    def _peek(self, order: _Order) -> Part | None:
        """What comes next; None while there is nothing to send."""
        message = order.message
        while order.part is None and order.at < len(message.wanted):
            bases = [copy[order.at] for copy in message.bases]
            bucket, content = message.wanted[order.at], message.contents[order.at]
            parts = self._find(bucket, content, bases, message.frame_bytes)
            if parts is None:
                return None
            order.at += 1
            order.parts = iter(parts)
            order.part = next(order.parts, None)
        return order.part
