"""The protobuf messages of the Tinker API: passes over data come in, logprobs and samples go out.

The messages are from `tinker_public.proto` of SDK 0.38, as far as they are served. An unknown field
is refused: it may mean something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, message
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from umbra.proto.errors import UsageError

Array = NDArray[Any]
PROTOBUF = "application/x-protobuf"
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32 = 1
_MOST_CELLS = 1 << 28  # of a tensor that came as the cells that are not zero
# The fields of each message, numbered from 1; a map is a list of entries.
_MESSAGES = {
    "Request": "model_id:string seq_id:int32 data:*Datum loss_fn:string legacy:*Number "
    "forward_only:bool config:*Setting",
    "Number": "key:string value:double",
    "Setting": "key:string value:Value",
    "Value": "number:double text:string",
    "Datum": "chunks:*Chunk inputs:*Input input_spans:*bytes loss_spans:*bytes",
    "Chunk": "text:Text image:bytes audio:bytes",
    "Text": "tokens:bytes",
    "Input": "key:string value:Tensor",
    "Tensor": "dense:bytes sparse:Sparse dtype:int32 shape:*int64",
    "Sparse": "values:bytes starts:bytes columns:bytes",
    "Output": "kind:string records:*Record metrics:*Number",
    "Record": "kind:string fields:*Field count:int64",
    "Field": "key:string value:Batch",
    "Batch": "data:bytes offsets:bytes dtype:int32 columns:*int64",
    "Samples": "sequences:*Sequence prompt_logprobs:bytes",
    "Sequence": "by_length:int32 tokens:bytes logprobs:bytes",
}
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _ONE, _REPEATED = 11, 1, 3


def _classes() -> dict[str, Any]:
    """Return a class for each message, in a pool that the SDK's own do not share."""
    described: Any = descriptor_pb2
    file = described.FileDescriptorProto(name="tinker", package="tinker", syntax="proto3")
    for name, fields in _MESSAGES.items():
        kind = file.message_type.add(name=name)
        for number, declaration in enumerate(fields.split(), start=1):
            key, _, of = declaration.partition(":")
            element = of.removeprefix("*")
            entry = kind.field.add(name=key, number=number, type=_TYPES.get(element, _MESSAGE))
            entry.label = _ONE if element == of else _REPEATED
            if element not in _TYPES:
                entry.type_name = f".tinker.{element}"
    pool = DescriptorPool()
    pool.Add(file)
    return {n: GetMessageClass(pool.FindMessageTypeByName(f"tinker.{n}")) for n in _MESSAGES}


_PB = _classes()


@dataclass(slots=True)
class Datum:
    """A sequence, and what its loss needs of each position."""

    tokens: Array  # int64 [N]
    inputs: dict[str, Array] = field(default_factory=dict[str, Array])  # [N] or [N, K]


@dataclass(slots=True)
class PassRequest:
    """A forward pass over `data`, and the backward pass of its loss unless `forward_only`."""

    loss_fn: str
    forward_only: bool
    config: dict[str, float]
    data: list[Datum]


def read_head(body: bytes) -> tuple[str, int, bool]:
    """Return a pass's model, its number, and if it is forward only; UsageError if it is none."""
    request = _parsed(body)
    return request.model_id, request.seq_id, request.forward_only


def read_pass(body: bytes) -> PassRequest:
    """Decode a ForwardBackwardRequest; UsageError if it is malformed or not supported."""
    request = _parsed(body)
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise UsageError("the request has a field that SDK 0.38 does not send: not supported")
    for setting in request.config:
        if setting.value.text:
            raise UsageError(f"loss_fn_config[{setting.key!r}] is no number")
    config = {setting.key: setting.value.number for setting in request.config}
    return PassRequest(
        request.loss_fn,
        request.forward_only,
        config or {setting.key: setting.value for setting in request.legacy},
        [_datum(datum) for datum in request.data],
    )


def write_outputs(logprobs: Sequence[Array], metrics: dict[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput: logprobs [N] or [N, K] of each datum, float32."""
    parts = [part.astype("<f4", copy=False) for part in logprobs]
    batch = _PB["Batch"](
        data=b"".join(part.tobytes() for part in parts),
        offsets=np.cumsum([0, *(part.nbytes for part in parts)], dtype="<i8").tobytes(),
        dtype=_FLOAT32,
        columns=next((part.shape[1:] for part in parts), ()),
    )
    fields = [_PB["Field"](key="logprobs", value=batch)]
    record = _PB["Record"](kind="ArrayRecord", fields=fields, count=len(parts))
    numbers = [_PB["Number"](key=key, value=value) for key, value in metrics.items()]
    output = _PB["Output"](kind="ArrayRecord", records=[record], metrics=numbers)
    return output.SerializeToString()


def write_samples(
    sequences: Iterable[tuple[Sequence[int], Sequence[float], bool]],
    prompt_logprobs: Array | None = None,
) -> bytes:
    """Encode a SampleResponse of `(tokens, logprobs, stopped)`; the rest ended by their length."""
    encoded = [
        _PB["Sequence"](
            by_length=int(not stopped),
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
        for tokens, logprobs, stopped in sequences
    ]
    scored = b"" if prompt_logprobs is None else prompt_logprobs.astype("<f4").tobytes()
    return _PB["Samples"](sequences=encoded, prompt_logprobs=scored).SerializeToString()


def _parsed(body: bytes) -> Any:
    request = _PB["Request"]()
    try:
        request.ParseFromString(body)
    except message.DecodeError as error:
        raise UsageError("the body is no ForwardBackwardRequest") from error
    return request


def _datum(datum: Any) -> Datum:
    if not all(chunk.HasField("text") for chunk in datum.chunks):
        raise UsageError("only token chunks are supported, not images or audio")
    tokens = b"".join(chunk.text.tokens for chunk in datum.chunks)
    try:
        inputs = {entry.key: _tensor(entry.value) for entry in datum.inputs}
        return Datum(np.frombuffer(tokens, "<i4").astype(np.int64), inputs)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UsageError(f"loss_fn_inputs or model_input is malformed: {error}") from error


def _tensor(tensor: Any) -> Array:
    dtype = _DTYPES[tensor.dtype]
    if not tensor.HasField("sparse"):
        flat = np.frombuffer(tensor.dense, dtype)
        return flat.reshape(tensor.shape) if tensor.shape else flat
    rows, columns = tensor.shape  # its cells that are not zero are given by rows (CSR)
    if rows < 0 or columns < 0 or rows * columns > _MOST_CELLS:
        raise ValueError(f"its shape is {tensor.shape}")
    starts = np.frombuffer(tensor.sparse.starts, "<i8")
    at = np.frombuffer(tensor.sparse.columns, "<i8")
    whole = np.zeros((rows, columns), dtype)
    cells = np.repeat(np.arange(rows), np.diff(starts)), at
    whole[cells] = np.frombuffer(tensor.sparse.values, dtype)
    return whole
