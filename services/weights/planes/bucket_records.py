"""The format of a bucket connection: a ticket, then records, sealed where a run has keys.

The receiver draws a key for each order and sends it over CURVE. It begins the connection with a
ticket derived from the key, which opens one connection. Each record is one piece of a bucket: a
head, the bytes, and an authentication tag. The nonce is the number of the record, so that none can
be left out, repeated or moved unnoticed. No socket, no thread.

    head    u32 bucket | u64 result | u64 base | u64 offset | u32 bytes     little-endian
    sealed  head | AES-256-GCM(bytes), with the head as associated data, and its tag
    open    head | bytes
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umbra.proto.bounds import KEY_BYTES
from umbra.proto.errors import WireError

HEAD = struct.Struct("<IQQQI")
TAG_BYTES = 16
RECORD_BYTES = 64 << 20  # at most
TICKET_BYTES = 32
TICKET = b"umbra connection for buckets"


class Piece(NamedTuple):
    """Bytes of a bucket: those from `offset` of content `result`, or a delta to it from `base`."""

    bucket: int
    result: int
    base: int
    offset: int


def ticket(key: bytes) -> bytes:
    """Return the first bytes of the connection for the order with this key."""
    return hmac.digest(key, TICKET, "sha256")


def pack_head(piece: Piece, nbytes: int) -> bytes:
    """Encode the head of a record."""
    return HEAD.pack(piece.bucket, piece.result, piece.base, piece.offset, nbytes)


def unpack_head(head: bytes | bytearray) -> tuple[Piece, int]:
    """Decode the head of a record: its piece and how many bytes follow.

    Raises:
        WireError: more than a record may have.
    """
    bucket, result, base, offset, nbytes = HEAD.unpack(head)
    if nbytes > RECORD_BYTES:
        raise WireError(f"a record of {nbytes} bytes", code="too_large")
    return Piece(bucket, result, base, offset), nbytes


class Seal:
    """One end of a connection whose records are encrypted and authenticated, each once.

    Args:
        key: `[KEY_BYTES]`, of the order.
    """

    def __init__(self, key: bytes) -> None:
        self._aes = AESGCM(key)
        self._count = 0

    def seal(self, head: bytes, raw: bytes | memoryview, sealed: memoryview) -> None:
        """Encrypt the bytes of the next record to `sealed`, `[len(raw) + TAG_BYTES]`."""
        self._aes.encrypt_into(self._nonce(), raw, head, sealed)

    def open(self, head: bytes, sealed: memoryview, place: memoryview) -> None:
        """Decrypt the bytes of the next record to `place`.

        Raises:
            WireError: it is not what the other end sealed as its next record.
        """
        try:
            self._aes.decrypt_into(self._nonce(), sealed, head, place)
        except InvalidTag:
            error = WireError("a record is not what was sealed with the key of its order")
            raise error from None

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")


def seal_of(key: bytes, *, keyed: bool) -> Seal | None:
    """Return one end of the connection for the order with `key`; None if it is open.

    Args:
        key: `[KEY_BYTES]`.
        keyed: whether the run has keys; without them everyone on the way knows this one too.

    Raises:
        WireError: it is no key.
    """
    if len(key) != KEY_BYTES:
        raise WireError(f"a key has {KEY_BYTES} bytes, not {len(key)}", path="key")
    return Seal(key) if keyed else None
