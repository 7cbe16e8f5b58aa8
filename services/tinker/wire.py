"""The wire of the Tinker API, and the records that the journal keeps.

JSON bodies say what to do. Data come and logprobs and samples go as protobuf messages, which are
from `tinker_public.proto` of SDK 0.38, as far as they are served. An unknown field is refused: it
may mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, message
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from msgspec import Meta
from numpy.typing import NDArray

from umbra.proto.errors import UsageError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Size = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class SessionRecord(msgspec.Struct, frozen=True):
    at: float  # of the last heartbeat that was written
    finished: bool = False


class Model(msgspec.Struct, frozen=True):
    """A model as its client asked for it, and where it is."""

    id: str
    session: str
    rank: int  # of its adapter; 0: all weights are trained
    seed: int
    created: float
    user_metadata: dict[str, Any] | None = None
    next: int = 1  # number of the request that follows
    snapshot: int = 0  # number of the last request that is in `state`
    state: str = ""  # folder of its newest snapshot


class Weights(msgspec.Struct, frozen=True):
    """A folder with weights; without one the base model."""

    rank: int = 0
    folder: str = ""
    checksum: str = ""


class SamplerRecord(msgspec.Struct, frozen=True):
    """A sampling session, and the path that it was made from."""

    weights: Weights = Weights()
    path: str | None = None


class Checkpoint(msgspec.Struct, frozen=True):
    weights: Weights
    kind: str
    size: int
    at: str
    expires: str | None
    user_metadata: dict[str, str] | None


class ApiBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of bodies; `type` only says which one it is."""

    type: str = ""


class Lora(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, Meta(ge=0, le=4096)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if self.rank and not (self.train_unembed and self.train_mlp and self.train_attn):
            raise ValueError("an adapter is on all layers here: leave train_mlp and others at true")


class CreateModel(ApiBody):
    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: dict[Literal["type"], Literal["adamw"]] | None = None


class LoadWeights(ApiBody):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[Literal["type"], Literal["adamw"]] | None = None


class Adam(msgspec.Struct, forbid_unknown_fields=True):
    learning_rate: Size = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Size = 1e-12
    weight_decay: Size = 0.0
    grad_clip_norm: Size = 0.0


class OptimStep(ApiBody):
    model_id: str
    seq_id: int
    adam_params: Adam


class SaveWeights(ApiBody):
    """A request to save weights, of any of the three kinds."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: Annotated[int, Meta(ge=1, le=10**10)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"

    @property
    def name(self) -> str:
        """Return the name of the checkpoint; raise UsageError if it cannot be one."""
        name = self.path or f"{self.seq_id:06d}"
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"checkpoint name {name!r}: use letters, digits, dots, dashes and underscores"
            )
        return name


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: Positive | None = None
    seed: int | None = None
    stop: str | list[int | str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Chunk(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class PromptChunks(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[Chunk]


class SampleBody(ApiBody):
    prompt: PromptChunks
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: Count
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Positive | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Raise UsageError if something is asked for that is not there."""
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name):
                raise UsageError(f"{name} is not supported: leave it out")
        if self.record_stability_info:
            raise UsageError("record_stability_info is not supported: choose another loss_fn")
        if self.sampling_params.seed is not None:
            raise UsageError("sampling_params.seed is not supported: samples share random numbers")


class CreateSampler(ApiBody):
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class Named(msgspec.Struct):
    """The subject of a body, read before its other fields."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    request_id: str = ""
    tinker_path: str = ""
    sdk_version: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Return the model, and the number of the request; 0 makes the model."""
        if self.session_id is not None and self.model_seq_id is not None:
            return f"{self.session_id}:train:{self.model_seq_id}", 0  # as the SDK makes it up too
        if self.model_id is None or self.seq_id is None or self.seq_id < 1:
            raise UsageError("the body names no model, or its request has no number (seq_id)")
        return self.model_id, self.seq_id


def session_of(model_id: str) -> str:
    return model_id.rpartition(":train:")[0]


def sampler_name(session: str, number: int) -> str:
    return f"{session}:sample:{number}"


def read(body: bytes, kind: type[T]) -> T:
    """Decode a body; UsageError with the field that is wrong or not supported."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"{kind.__name__}: {error}") from error


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
