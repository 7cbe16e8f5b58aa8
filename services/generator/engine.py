"""What a generator asks of an inference engine: tokens in, tokens out, weights swapped in between.

The engine knows no text, environment or sample. One thread drives it: `submit`, `poll` until
outputs come, and between two polls, that is at a token boundary, `load_weights` or `abort`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from umbra.proto.records import Manifest, Sampling, VersionSpan

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
KvPolicy = Literal["keep", "recompute", "abort"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Continue `prompt_ids` by at most `max_tokens` tokens; a stop token ends it and is kept."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What became of a request. T new tokens.

    `logprobs` are those of the distribution that was sampled from, after temperature, top-k, top-p
    and min-p; of the plain softmax when `temperature` is 0 (greedy). `spans` cover `[0, T)`.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason


class Engine(Protocol):
    """An inference engine with continuous batching."""

    version: int
    """Version of the weights that it serves; -1 until `load_weights` was called."""
    slots: int
    """Sequences decoded at once."""
    max_context: int
    """Prompt plus new tokens of a sequence at most."""
    decoded_tokens: int
    """Tokens sampled so far, for throughput."""

    @property
    def live(self) -> int:
        """Sequences being decoded."""
        ...

    @property
    def free(self) -> int:
        """Slots that neither a live nor a queued request will take."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        ...

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests`.

        Raises:
            ValueError: an empty prompt, or one that leaves no room in `max_context`.
        """
        ...

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Make progress (at most until something finished) and return what has finished."""
        ...

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, kv_policy: KvPolicy
    ) -> list[EngineOutput]:
        """Serve `version` from the next token on; returns what was aborted under policy "abort".

        Raises:
            UsageError: the tensors do not fit the model; it still serves the old version whole.
        """
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """End these requests (None: all) now; returns what there is of them."""
        ...

    def peek(self) -> list[EngineOutput]:
        """What there is so far of every live request, which goes on; "abort" as finish reason."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine that can also load a version that never is in memory as a whole."""

    def load_buckets(
        self,
        manifest: Manifest,
        buckets: Iterable[tuple[int, memoryview]],
        version: int,
        kv_policy: KvPolicy,
    ) -> list[EngineOutput]:
        """As `load_weights`, from start and bytes of every bucket in order.

        Raises:
            UsageError: the tensors do not fit the model; it still serves the old version whole.
            UmbraError: `buckets` broke off; the engine must not be used until it has loaded a
                version whole.
        """
        ...
