"""Messages to frames and back: `[header][body]`, MessagePack, all of it bounded.

Decoding never raises anything but `WireError`, whatever the bytes. A frame's size is looked at
first (`access.py`), and then each value is checked while it is read (`bounds.py`), before the next
one is made: a refused value costs no more than the ones before it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NoReturn, TypeAlias, TypeVar

import msgspec

from umbra.proto.access import HEADER_BYTES, SUBMIT_BYTES, body_bytes
from umbra.proto.bounds import SUBMITTED
from umbra.proto.errors import LimitError, WireError
from umbra.proto.messages import TYPES, Header, Message, Nack
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR

FILL_BYTES = SUBMIT_BYTES // 4  # of arrays in a portion; its other values come on top
REASON_CHARS = 200  # of a refusal; enough to recognise the value
Frame: TypeAlias = bytes | memoryview
S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$\.?([^`]*)`", re.DOTALL)


class Envelope(msgspec.Struct, frozen=True, gc=False):
    header: Header
    body: Message


class Encoder:
    """Stamps and packs the messages of one sender. Not thread-safe, like the socket it serves."""

    def __init__(self, sender: str, incarnation: str) -> None:
        self.sender = sender
        self.incarnation = incarnation
        self._next_id = 0

    def encode(self, body: Message, *, reply_to: int | None = None) -> tuple[int, list[bytes]]:
        """Return the new message's id and its frames; WireError if nobody could read them."""
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
        return self._next_id, [_pack(header, HEADER_BYTES), _pack(body, body_bytes(type(body)))]


def decode(frames: Sequence[Frame]) -> Envelope:
    """Return the message in `frames`; WireError, LimitError if something is too large."""
    header = decode_header(frames)
    kind = kind_of(header)
    return decode_body(header, kind, frames, body_bytes(kind))


def decode_header(frames: Sequence[Frame]) -> Header:
    if len(frames) < 2:
        raise WireError(f"expected at least 2 frames, got {len(frames)}", code="frames")
    if len(frames[0]) > HEADER_BYTES:
        raise LimitError(f"header of {len(frames[0])} bytes, at most {HEADER_BYTES}")
    header = _decode(frames[0], Header)
    if header.major != PROTOCOL_MAJOR:
        older = f"of {header.sender}" if header.major < PROTOCOL_MAJOR else "here"
        raise WireError(
            f"{header.sender} speaks protocol {header.major}.{header.minor}, this process "
            f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: upgrade the umbra-rl {older}",
            path="major",
            code="protocol",
        )
    return header


def kind_of(header: Header) -> type[Message]:
    """Return the class of the message that `header` announces; WireError if it is unknown."""
    if (kind := TYPES.get(header.type)) is None:
        raise WireError(f"unknown message type {header.type!r}", path="type", code="unknown_type")
    return kind


def decode_body(
    header: Header, kind: type[Message], frames: Sequence[Frame], most_bytes: int
) -> Envelope:
    check_frames(header, frames, most_bytes)
    return Envelope(header, _decode(frames[1], kind))


def check_frames(header: Header, frames: Sequence[Frame], most_bytes: int) -> None:
    """Raise WireError unless there is one body, of at most `most_bytes`."""
    if len(frames[1]) > most_bytes:
        raise LimitError(f"{header.type} of {len(frames[1])} bytes, at most {most_bytes}")
    if len(frames) > 2:
        raise WireError(f"{header.type}: expected 2 frames, got {len(frames)}", code="frames")


def nack(error: WireError) -> Nack:
    return Nack(code=error.code, reason=str(error), path=error.path)


def _pack(struct: msgspec.Struct, limit_bytes: int) -> bytes:
    name = type(struct).__name__
    try:
        packed = msgspec.msgpack.encode(struct)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{name} cannot be encoded: {error}", code="unencodable") from error
    if len(packed) > limit_bytes:
        raise LimitError(f"{name} of {len(packed)} bytes, at most {limit_bytes}")
    return packed


def _decode(frame: Frame, cls: type[S]) -> S:
    try:
        return _decoder(cls).decode(frame)
    except msgspec.ValidationError as error:
        raise _refusal(cls, str(error)) from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise WireError(f"not MessagePack: {str(error) or type(error).__name__}") from error


@cache
def _decoder(cls: type[S]) -> msgspec.msgpack.Decoder[S]:
    return msgspec.msgpack.Decoder(cls, ext_hook=_refuse_extension)


def _refuse_extension(code: int, _data: memoryview) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _refusal(cls: type[msgspec.Struct], text: str) -> WireError:
    """Return the decoder's error with its place, cut: it may quote a value of any length."""
    match = _PLACE.fullmatch(text)
    reason, path = match.groups() if match else (text, "")
    if len(reason) > REASON_CHARS:
        reason = reason[:REASON_CHARS] + "..."
    place = f"{cls.__name__}.{path}" if path else cls.__name__
    kind = LimitError if " of length <= " in reason else WireError
    return kind(f"{place}: {reason}", path=path or "$")


def portions(
    items: Sequence[T], size: Callable[[T], int], most: int = SUBMITTED, fill: int = FILL_BYTES
) -> Iterator[list[T]]:
    """Split `items` into lists that fit into a message: at most `most`, of about `fill` bytes."""
    portion: list[T] = []
    filled = 0
    for item in items:
        length = size(item)
        if portion and (len(portion) == most or filled + length > fill):
            yield portion
            portion, filled = [], 0
        portion.append(item)
        filled += length
    if portion:
        yield portion
