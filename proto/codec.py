"""Messages to frames and back: `[header][body]`, plain MessagePack, every length bounded.

Decoding never raises anything but `WireError`, whatever the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import msgspec

from umbra.proto.errors import LimitError, RejectedError, WireError
from umbra.proto.messages import TYPES, Header, Message, Nack
from umbra.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is decoded, in bytes and items; sockets take `frame_bytes` as MAXMSGSIZE."""

    header_bytes: int = 4 << 10
    frame_bytes: int = 256 << 20
    bin_bytes: int = 64 << 20
    str_bytes: int = 16 << 20
    items: int = 1 << 20


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with its header."""

    header: Header
    body: Message


class Encoder:
    """Stamps and packs the messages of one sender. Not thread-safe, like the socket it serves."""

    def __init__(self, sender: str, incarnation: str) -> None:
        self.sender = sender
        self.incarnation = incarnation
        self._next_id = 0

    def encode(self, body: Message, *, reply_to: int | None = None) -> tuple[int, list[bytes]]:
        """The new message's id and its frames."""
        self._next_id += 1
        header = Header(
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            type=type(body).__name__,
            id=self._next_id,
            sender=self.sender,
            incarnation=self.incarnation,
            reply_to=reply_to,
            sent_at=time.time(),
        )
        return self._next_id, [_pack(header), _pack(body)]


def decode(frames: Sequence[bytes], limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """The message in `frames`.

    Raises:
        WireError: not a message of this protocol; `path` and `code` tell what is wrong.
        LimitError: above `limits`.
    """
    header = decode_header(frames, limits)
    cls = TYPES.get(header.type)
    if cls is None:
        raise WireError(f"unknown message type {header.type!r}", path="type", code="unknown_type")
    return Envelope(header, _convert(_unpack(frames[1], limits), cls))


def decode_header(frames: Sequence[bytes], limits: Limits = DEFAULT_LIMITS) -> Header:
    """The header alone, so that a message whose body is bad can still be answered."""
    if len(frames) != 2:
        raise WireError(f"expected 2 frames, got {len(frames)}", code="frames")
    if len(frames[0]) > limits.header_bytes:
        raise LimitError(f"header of {len(frames[0])} bytes, at most {limits.header_bytes}")
    header = _convert(_unpack(frames[0], limits), Header)
    if header.major != PROTOCOL_MAJOR:
        older = "peer" if header.major < PROTOCOL_MAJOR else "own package"
        raise WireError(
            f"{header.sender} speaks protocol {header.major}.{header.minor}, this process "
            f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: upgrade the {older}",
            path="major",
            code="protocol",
        )
    return header


def expect(envelope: Envelope, cls: type[M]) -> M:
    """The body as a `cls`.

    Raises:
        RejectedError: the peer answered with a Nack.
        WireError: the peer answered with something else.
    """
    body = envelope.body
    if isinstance(body, cls):
        return body
    if isinstance(body, Nack):
        raise RejectedError(f"{envelope.header.sender}: {body.reason}", code=body.code)
    raise WireError(
        f"{envelope.header.sender} answered {envelope.header.type} instead of {cls.__name__}",
        path="type",
        code="unexpected",
    )


def nack(error: WireError) -> Nack:
    """The answer to a message that could not be decoded."""
    return Nack(code=error.code, reason=str(error), path=error.path)


def _pack(struct: msgspec.Struct) -> bytes:
    packed = msgpack.packb(msgspec.to_builtins(struct, builtin_types=(bytes,)), use_bin_type=True)
    assert packed is not None
    return packed


def _unpack(frame: bytes, limits: Limits) -> Any:
    if len(frame) > limits.frame_bytes:
        raise LimitError(f"frame of {len(frame)} bytes, at most {limits.frame_bytes}")
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_bin_len=limits.bin_bytes,
            max_str_len=limits.str_bytes,
            max_array_len=limits.items,
            max_map_len=limits.items,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # RecursionError: msgpack raises StackError (a ValueError) at its own depth, but a frame of
        # nested maps can exhaust Python's stack first.
        raise WireError(f"not MessagePack: {error or type(error).__name__}") from error


def _convert(data: Any, cls: type[Any]) -> Any:
    try:
        return msgspec.convert(data, cls, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, where = str(error).partition(" - at `")
        raise WireError(f"{cls.__name__}: {reason}", path=where.rstrip("`") or "$") from error
