"""The JSON bodies of the Tinker API that do something, and the records that the journal keeps.

A field of a body that is not here is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from umbra.proto.errors import UsageError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Size = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class TrainedShape(msgspec.Struct, frozen=True):
    """The trained part of the model: an adapter of `rank`, or with rank 0 all weights."""

    rank: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class SessionRecord(msgspec.Struct, frozen=True):
    at: float  # of the last heartbeat that was written
    finished: bool = False


class Model(msgspec.Struct, frozen=True):
    """A model as its client asked for it, and where it is."""

    id: str
    session: str
    shape: TrainedShape
    seed: int
    created: float
    user_metadata: dict[str, Any] | None = None
    next: int = 1  # number of the request that follows
    snapshot: int = 0  # number of the last request that is in `state`
    state: str = ""  # folder of its newest snapshot


class Weights(msgspec.Struct, frozen=True):
    """A folder with weights; without one the base model."""

    shape: TrainedShape = TrainedShape()
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

    @property
    def shape(self) -> TrainedShape:
        same = msgspec.convert(self, TrainedShape, from_attributes=True)
        return same if self.rank else TrainedShape()


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
    ttl_seconds: Positive | None = None
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
