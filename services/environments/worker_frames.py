"""What the pool and its worker processes say to each other: MessagePack with a length before it."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

from umbra.proto.errors import UNREADABLE
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.runtime.config import EnvironmentConfig

MAX_FRAME = 256 << 20
_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, tag="setup"):
    """First to a worker: which environment."""

    config: EnvironmentConfig


class Hello(msgspec.Struct, tag="hello"):
    """First from a worker: how many plays it takes at once, or why it can't work."""

    room: int = 1
    usage_error: str = ""


class Play(msgspec.Struct, tag="play"):
    """To a worker: the last of `responses` is new."""

    number: int
    key: str
    row: dict[str, Any]
    responses: list[str]


class Forget(msgspec.Struct, tag="forget"):
    """To a worker: the sample is over."""

    key: str


class Played(msgspec.Struct, tag="played"):
    """From a worker: answers, or why there are none. `exhausted`: memory ran out, it leaves."""

    number: int
    results: list[Opening | StepResult] = msgspec.field(default_factory=list)
    error: str = ""
    exhausted: bool = False


ToWorker = Setup | Play | Forget
FromWorker = Hello | Played
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """`message` as bytes."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_by_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """The next message to a worker; None at the end."""
    body = await _read(reader)
    return None if body is None else _to_worker.decode(body)


async def read_from_worker(reader: asyncio.StreamReader) -> FromWorker | None:
    """The next message of a worker; None at the end, or if it is no message."""
    body = await _read(reader)
    try:
        return None if body is None else _from_worker.decode(body)
    except UNREADABLE:
        return None


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= MAX_FRAME else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
