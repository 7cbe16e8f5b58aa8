"""The connection on which a receiver orders buckets and gets them, as proto/weights.md says.

A source of buckets makes up a secret and sends it to the hub, which gives each receiver a grant of
its own: an identity, and the key that follows from it and the secret. With keys, everything after
the greeting is sealed; the number of a record is its nonce, so that none is left out unnoticed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umbra.proto.errors import WireError

HEAD = struct.Struct("<IQQQI")
TAG_BYTES = 16
RECORD_BYTES = 64 << 20  # at most
SEALED_BYTES = 1 << 20  # sealed at once: they are still in the cache when they are sent
SMALLEST_FRAME = 1 << 10
TOGETHER_BYTES = 64 << 10  # smaller records are sent together
NONCE_BYTES = 16
HELLO_BYTES = 2 * NONCE_BYTES + 32
ORDER, WAIT, REFUSED = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD  # in place of a bucket
BEAT_S = 1.0  # of a source that has nothing to send
LOOK_S = 0.05  # that a receiver waits without a look at what else there is


class Piece(NamedTuple):
    """Bytes of a bucket: from `offset` of content `result` on, or a delta to it from `base`."""

    bucket: int
    result: int = 0
    base: int = 0
    offset: int = 0


Part = tuple[Piece, bytes | memoryview]
"""A piece and its bytes."""


class BucketOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets that a receiver asks for, in this order, and the content wanted of each.

    `bases`: the contents that it holds of them, one list per copy, 0 for nothing.
    """

    wanted: list[int]
    contents: list[int]
    bases: list[list[int]] = []
    frame_bytes: int  # at most, in one record

    def check(self, buckets: int) -> None:
        count = len(self.wanted)
        if any(len(values) != count for values in (self.contents, *self.bases)):
            raise WireError("contents and bases need an entry per bucket", path="contents")
        if not all(0 <= bucket < buckets for bucket in self.wanted):
            raise WireError(f"a bucket is not below {buckets}", path="wanted")
        if not SMALLEST_FRAME <= self.frame_bytes <= RECORD_BYTES:
            raise WireError(
                f"{self.frame_bytes} is not from {SMALLEST_FRAME} to {RECORD_BYTES}",
                path="frame_bytes",
            )


def grant(secret: bytes, identity: bytes = b"") -> bytes:
    """Return a grant for the source with this secret, a fresh one if no `identity` is given."""
    identity = identity or secrets.token_bytes(NONCE_BYTES)
    return identity + hmac.digest(secret, identity, "sha256")


class Records:
    """One end of a connection, for one thread; `idle` is called again and again, and may raise."""

    def __init__(self, connection: socket.socket, idle: Callable[[], object]) -> None:
        self.connection = connection
        self.last_bytes_at = time.monotonic()  # when bytes came
        self._idle = idle
        self._seals: tuple[AESGCM, AESGCM] | None = None  # for sending, for receiving
        self._sent = self._came = 0
        self._waiting = bytearray()
        self._block = memoryview(bytearray(0))
        bound = struct.pack("ll", int(LOOK_S), round(LOOK_S % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, granted: bytes, *, sealed: bool) -> None:
        """Begin as the receiver with this grant; OSError if the source refuses or is gone."""
        greeting = granted[:NONCE_BYTES] + secrets.token_bytes(NONCE_BYTES)
        self.connection.sendall(greeting + hmac.digest(granted[NONCE_BYTES:], greeting, "sha256"))
        greeting += self._fill(memoryview(bytearray(NONCE_BYTES)))
        if sealed:
            self._seals = _seal(granted, b"orders", greeting), _seal(granted, b"pieces", greeting)

    def admit(self, secret: bytes, *, sealed: bool) -> None:
        """Begin as the source with this secret; WireError if the receiver has no grant."""
        shown = bytes(self._fill(memoryview(bytearray(HELLO_BYTES))))
        greeting, proof = shown[: 2 * NONCE_BYTES], shown[2 * NONCE_BYTES :]
        granted = grant(secret, greeting[:NONCE_BYTES])
        if not hmac.compare_digest(hmac.digest(granted[NONCE_BYTES:], greeting, "sha256"), proof):
            raise WireError("a connection without a grant")
        answer = secrets.token_bytes(NONCE_BYTES)
        self.connection.sendall(answer)
        if sealed:
            greeting += answer
            self._seals = _seal(granted, b"pieces", greeting), _seal(granted, b"orders", greeting)

    def send(self, piece: Piece, raw: bytes | memoryview, timeout_s: float | None = None) -> None:
        """Send a record, or keep it for the next ones or `flush`; OSError after `timeout_s`."""
        head = HEAD.pack(*piece, len(raw))
        if self._seals is not None:
            self._sent += 1
            sealed = self._room(len(raw) + TAG_BYTES)
            self._seals[0].encrypt_into(self._sent.to_bytes(12, "little"), raw, head, sealed)
            raw = sealed
        self._waiting += head
        if len(raw) >= TOGETHER_BYTES:
            self.flush(timeout_s)
            self._send_now(raw, timeout_s)
            return
        self._waiting += raw
        if len(self._waiting) >= TOGETHER_BYTES:
            self.flush(timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        self._send_now(self._waiting, timeout_s)
        self._waiting.clear()

    def _send_now(self, data: bytes | bytearray | memoryview, timeout_s: float | None) -> None:
        if data:
            self.connection.settimeout(timeout_s)  # of all of it
            self.connection.sendall(data)
            self.connection.settimeout(None)

    def next(
        self,
        room: Callable[[Piece, int], memoryview | None] = lambda _piece, _nbytes: None,
        most: int = RECORD_BYTES,
    ) -> tuple[Piece, memoryview]:
        """Receive a record of at most `most` bytes: its piece and its bytes.

        Args:
            room: gives the memory for a piece of so many bytes, None for fresh memory.

        Raises:
            WireError: it is not what the other end sealed, or too large.
        """
        head = bytes(self._fill(memoryview(bytearray(HEAD.size))))
        *fields, nbytes = HEAD.unpack(head)
        if nbytes > most:
            raise WireError(f"a record of {nbytes} bytes, at most {most}", code="too_large")
        piece = Piece(*fields)
        if (place := room(piece, nbytes)) is None:
            place = memoryview(bytearray(nbytes))
        if self._seals is None:
            return piece, self._fill(place)
        sealed = self._fill(self._room(nbytes + TAG_BYTES))
        self._came += 1
        try:
            self._seals[1].decrypt_into(self._came.to_bytes(12, "little"), sealed, head, place)
        except InvalidTag:
            raise WireError("a record is not what was sealed for this connection") from None
        return piece, place

    def _room(self, size: int) -> memoryview:
        if len(self._block) < size:
            self._block = memoryview(bytearray(size))
        return self._block[:size]

    def _fill(self, memory: memoryview) -> memoryview:
        """Receive bytes until `memory` is full, as many as come with each call of the kernel."""
        done = 0
        while done < len(memory):
            try:
                count = self.connection.recv_into(memory[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self._idle()
                continue
            if count == 0:
                raise ConnectionError("the connection was closed")
            self.last_bytes_at = time.monotonic()
            done += count
        return memory


def _seal(granted: bytes, direction: bytes, greeting: bytes) -> AESGCM:
    return AESGCM(hmac.digest(granted[NONCE_BYTES:], direction + greeting, "sha256"))
