"""The protobuf messages of the Tinker API: passes over data come in, logprobs and samples go out.

Few messages with few fields, so they are read and written here; the SDK's own classes are not
needed to serve it. Numbers of fields are from `tinker_public.proto` of SDK 0.38. A field that is
not known is refused: it may mean something.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.proto.errors import UsageError

Array = NDArray[Any]
PROTOBUF = "application/x-protobuf"
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_MOST_BITS = 64
_MOST_CELLS = 1 << 28  # of a tensor that came as the cells that are not zero


@dataclass(slots=True)
class Datum:
    """A sequence, and what its loss needs of each position."""

    tokens: Array  # int64 [N]
    inputs: dict[str, Array] = field(default_factory=dict)  # [N] or [N, K]


@dataclass(slots=True)
class PassRequest:
    """A forward pass over `data`, and the backward pass of its loss unless `forward_only`."""

    model_id: str = ""
    seq_id: int = 0
    data: list[Datum] = field(default_factory=list)
    loss_fn: str = ""
    config: dict[str, float] = field(default_factory=dict)
    forward_only: bool = False


def read_head(body: bytes) -> tuple[str, int, bool]:
    """Return a pass's model, its number, and if it is forward only; UsageError if it is none."""
    found: dict[int, Any] = {1: b"", 2: 0, 6: 0}
    for number, value in _fields(memoryview(body)):
        if number in found:
            found[number] = value
    if isinstance(found[1], int) or not (isinstance(found[2], int) and isinstance(found[6], int)):
        raise UsageError("the body is no ForwardBackwardRequest")
    return _text(found[1]), found[2], bool(found[6])


def read_pass(body: bytes) -> PassRequest:
    """Decode a ForwardBackwardRequest.

    Raises:
        UsageError: it is malformed, or has a field or a kind of input that is not supported.
    """
    made = PassRequest()
    legacy: dict[str, float] = {}
    for number, value in _fields(memoryview(body)):
        match number, value:
            case 1, memoryview():
                made.model_id = _text(value)
            case 2, int():
                made.seq_id = value
            case 3, memoryview():
                made.data.append(_datum(value))
            case 4, memoryview():
                made.loss_fn = _text(value)
            case 5, memoryview():
                key, number_bytes = _entry(value)
                legacy[key] = _float(number_bytes)
            case 6, int():
                made.forward_only = bool(value)
            case 7, memoryview():
                key, setting = _entry(value)
                made.config[key] = _setting(key, setting)
            case _:
                raise _unknown("ForwardBackwardRequest", number)
    made.config = made.config or legacy
    return made


def write_outputs(logprobs: Sequence[Array], metrics: dict[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput: logprobs [N] or [N, K] of each datum, float32."""
    columns = next((one.shape[1:] for one in logprobs), ())
    ends = np.cumsum([0, *(one.nbytes for one in logprobs)], dtype="<i8")
    tensor = (
        _bytes(1, b"".join(one.astype("<f4", copy=False).tobytes() for one in logprobs))
        + _bytes(2, ends.tobytes())
        + _varint(3, _FLOAT32)
        + b"".join(_varint(4, size) for size in columns)
    )
    record = (
        _bytes(1, b"ArrayRecord")
        + _bytes(2, _bytes(1, b"logprobs") + _bytes(2, tensor))
        + _varint(3, len(logprobs))
    )
    told = b"".join(
        _bytes(3, _bytes(1, key.encode()) + b"\x11" + struct.pack("<d", value))
        for key, value in metrics.items()
    )
    return _bytes(1, b"ArrayRecord") + _bytes(2, record) + told


def write_samples(
    sequences: Iterable[tuple[Sequence[int], Sequence[float], bool]],
    prompt_logprobs: Array | None = None,
) -> bytes:
    """Encode a SampleResponse of `(tokens, logprobs, stopped)`; the rest ended by their length."""
    made = b"".join(
        _bytes(
            1,
            _varint(1, 0 if stopped else 1)
            + _bytes(2, np.asarray(tokens, "<i4").tobytes())
            + _bytes(3, np.asarray(logprobs, "<f4").tobytes()),
        )
        for tokens, logprobs, stopped in sequences
    )
    if prompt_logprobs is None:
        return made
    return made + _bytes(2, prompt_logprobs.astype("<f4").tobytes())


def _datum(data: memoryview) -> Datum:
    made = Datum(np.empty(0, np.int64))
    chunks: list[Array] = []
    for number, value in _fields(data):
        match number, value:
            case 1, memoryview():
                chunks.append(_chunk(value))
            case 2, memoryview():
                key, tensor = _entry(value)
                made.inputs[key] = _tensor(key, tensor)
            case 3 | 4, memoryview():
                pass  # where the tokens come from: stable_reinforce alone reads it
            case _:
                raise _unknown("Datum", number)
    if chunks:
        made.tokens = np.concatenate(chunks).astype(np.int64)
    return made


def _chunk(data: memoryview) -> Array:
    for number, value in _fields(data):
        if number != 1 or isinstance(value, int):
            raise UsageError("only token chunks are supported, not images or audio")
        for inner, tokens in _fields(value):
            if inner == 1 and not isinstance(tokens, int):
                return np.frombuffer(tokens, "<i4")
    return np.empty(0, "<i4")


def _tensor(name: str, data: memoryview) -> Array:
    dense: memoryview | None = None
    sparse: dict[int, memoryview] | None = None
    kind = 0
    shape: list[int] = []
    for number, value in _fields(data):
        match number, value:
            case 1, memoryview():
                dense = value
            case 2, memoryview():
                sparse = {n: part for n, part in _fields(value) if isinstance(part, memoryview)}
            case 3, int():
                kind = value
            case 4, int():
                shape.append(value)
            case 4, memoryview():
                shape += _packed(value)
            case _:
                raise _unknown("Tensor", number)
    try:
        dtype = _DTYPES[kind]
        if sparse is not None:
            return _densified(sparse, dtype, shape)
        flat = np.frombuffer(dense or b"", dtype)
        return flat.reshape(shape) if shape else flat
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UsageError(f"loss_fn_inputs[{name!r}] is malformed: {error}") from error


def _densified(parts: dict[int, memoryview], dtype: np.dtype[Any], shape: list[int]) -> Array:
    """Return the tensor [N, K] whose cells that are not zero are given by rows (CSR)."""
    rows, columns = shape
    if rows < 0 or columns < 0 or rows * columns > _MOST_CELLS:
        raise ValueError(f"its shape is {shape}")
    starts, at = np.frombuffer(parts[2], "<i8"), np.frombuffer(parts[3], "<i8")
    whole = np.zeros((rows, columns), dtype)
    whole[np.repeat(np.arange(rows), np.diff(starts)), at] = np.frombuffer(parts[1], dtype)
    return whole


def _setting(key: str, data: memoryview) -> float:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, memoryview):
            return _float(value)
        raise UsageError(f"loss_fn_config[{key!r}] is no number")
    return 0.0


def _entry(data: memoryview) -> tuple[str, memoryview]:
    """Return key and value of an entry of a map."""
    found = {n: v for n, v in _fields(data) if isinstance(v, memoryview)}
    return _text(found.get(1, memoryview(b""))), found.get(2, memoryview(b""))


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field; UsageError if it is no protobuf message."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > len(data):
            raise UsageError("the body is no protobuf message")
        yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < _MOST_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise UsageError("the body is no protobuf message")


def _packed(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read_varint(data, at)
        yield value


def _float(data: memoryview) -> float:
    if len(data) not in (4, 8):
        return 0.0  # a zero is left out
    return struct.unpack("<f" if len(data) == 4 else "<d", data)[0]


def _text(data: memoryview | bytes) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise UsageError("the body is no protobuf message") from error


def _unknown(message: str, number: int) -> UsageError:
    return UsageError(f"{message} has a field {number} that SDK 0.38 does not send: not supported")


def _bytes(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(value)) + value


def _varint(number: int, value: int) -> bytes:
    return _encoded(number << 3) + _encoded(value)


def _encoded(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
