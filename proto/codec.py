"""Messages to frames and back: `[header][body][raw frame]*`, MessagePack, every length bounded.

Decoding never raises anything but `WireError`, whatever the bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast

import msgpack
import msgspec
import msgspec.inspect

from umbra.proto.errors import LimitError, WireError
from umbra.proto.messages import TYPES, Header, Message, Nack
from umbra.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

REASON_CHARS = 200  # of a refusal; enough to recognise what was sent
Frame: TypeAlias = bytes | memoryview
S = TypeVar("S", bound=msgspec.Struct)
_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$\.?([^`]*)`", re.DOTALL)
_OVER_LIMIT = re.compile(r"\d+ exceeds max_(?:bin|str|array|map)_len\(\d+\)")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is decoded, in bytes and items; sockets take `frame_bytes` as MAXMSGSIZE."""

    header_bytes: int = 4 << 10
    frame_bytes: int = 256 << 20
    bin_bytes: int = 64 << 20
    str_bytes: int = 16 << 20
    items: int = 16 << 20

    @property
    def safe_bytes(self) -> int:
        """In a frame of so many bytes no limit can be passed."""
        return min(self.frame_bytes, self.bin_bytes, self.str_bytes, self.items)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with its header; `raw` are the frames after the body, as they came."""

    header: Header
    body: Message
    raw: Sequence[Frame] = ()


class Encoder:
    """Stamps and packs the messages of one sender. Not thread-safe, like the socket it serves."""

    def __init__(self, sender: str, incarnation: str) -> None:
        self.sender = sender
        self.incarnation = incarnation
        self._next_id = 0

    def encode(self, body: Message, *, reply_to: int | None = None) -> tuple[int, list[bytes]]:
        """The new message's id and its frames.

        Raises:
            WireError: the message holds what MessagePack can't say, a lone surrogate for example.
            LimitError: a frame is larger than what its receiver takes.
        """
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
        frames = [
            _pack(header, DEFAULT_LIMITS.header_bytes),
            _pack(body, DEFAULT_LIMITS.frame_bytes),
        ]
        return self._next_id, frames


def decode(
    frames: Sequence[Frame],
    limits: Limits = DEFAULT_LIMITS,
    raw: Sequence[Frame] = (),
) -> Envelope:
    """The message in `frames`; raw frames may be among them, or apart in `raw`.

    Raises:
        WireError: not a message of this protocol; `path` and `code` tell what is wrong.
        LimitError: above `limits`.
    """
    return decode_body(decode_header(frames, limits), frames, limits, raw)


def decode_body(
    header: Header,
    frames: Sequence[Frame],
    limits: Limits = DEFAULT_LIMITS,
    raw: Sequence[Frame] = (),
) -> Envelope:
    """The rest of `decode`, for those who look at the header first."""
    cls = TYPES.get(header.type)
    if cls is None:
        raise WireError(f"unknown message type {header.type!r}", path="type", code="unknown_type")
    body = _decode_frame(frames[1], cls, limits)
    raw = (*frames[2:], *raw)
    if len(raw) != body.raw_frames():
        raise WireError(
            f"{header.type}: expected {body.raw_frames()} raw frames, got {len(raw)}", code="frames"
        )
    if any(len(frame) > limits.frame_bytes for frame in raw):
        raise LimitError(f"a raw frame of more than {limits.frame_bytes} bytes")
    return Envelope(header, body, raw)


def decode_header(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Header:
    """The header alone, so that a message whose body is bad can still be answered."""
    if len(frames) < 2:
        raise WireError(f"expected at least 2 frames, got {len(frames)}", code="frames")
    if len(frames[0]) > limits.header_bytes:
        raise LimitError(f"header of {len(frames[0])} bytes, at most {limits.header_bytes}")
    header = _decode_plain(frames[0], Header, limits)
    if header is None or header.major != PROTOCOL_MAJOR:
        data = _unpack(frames[0], limits)
        _check_major(data)
        header = _convert(data, Header)
    return header


def nack(error: WireError) -> Nack:
    """The answer to a message that could not be decoded."""
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


def _check_major(header: Any) -> None:
    """Refuse another major version first: it may have changed the rest of the header."""
    if not isinstance(header, dict):
        return
    fields = cast("dict[str, Any]", header)
    major = fields.get("major")
    if not isinstance(major, int) or major == PROTOCOL_MAJOR:
        return
    sender = fields.get("sender", "a peer")
    older = f"of {sender}" if major < PROTOCOL_MAJOR else "here"
    raise WireError(
        f"{sender} speaks protocol {major}.{fields.get('minor')}, this process "
        f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: upgrade the umbra-rl {older}",
        path="major",
        code="protocol",
    )


def _decode_frame(frame: Frame, cls: type[S], limits: Limits) -> S:
    found = _decode_plain(frame, cls, limits)
    return _convert(_unpack(frame, limits), cls) if found is None else found


def _decode_plain(frame: Frame, cls: type[S], limits: Limits) -> S | None:
    """A `cls` straight from its bytes, several times faster; None if only the longer way will do.

    In a short frame no length can be above its limit. What is wrong with a bad one is not told.
    """
    decoder = _plain_decoder(cls)
    if decoder is None or len(frame) > limits.safe_bytes:
        return None
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


@cache
def _plain_decoder(cls: type[S]) -> msgspec.msgpack.Decoder[S] | None:
    """None if `cls` has values of any type: extensions, for one, are to be refused in them."""
    if "AnyType" in repr(msgspec.inspect.type_info(cls)):
        return None
    return msgspec.msgpack.Decoder(cls)


def _unpack(frame: Frame, limits: Limits) -> Any:
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
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__  # StackError, for one, has no text
        if _OVER_LIMIT.fullmatch(reason):
            raise LimitError(f"a length of {reason}") from error
        raise WireError(f"not MessagePack: {reason}") from error


def _refuse_extension(code: int, _data: bytes) -> Any:
    # An extension of length zero gets past max_ext_len, and its ExtType would pass for an array.
    raise ValueError(f"extension type {code}")


def _convert(data: Any, cls: type[S]) -> S:
    try:
        return msgspec.convert(data, cls, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        # The reason may quote what was sent: of any length, and with anything in it.
        found = _PLACE.fullmatch(str(error))
        reason, path = found.groups() if found else (str(error), "")
        if len(reason) > REASON_CHARS:
            reason = reason[:REASON_CHARS] + "..."
        place = f"{cls.__name__}.{path}" if path else cls.__name__
        raise WireError(f"{place}: {reason}", path=path or "$") from error
