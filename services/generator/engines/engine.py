"""The interface of an inference engine: tokens in, tokens out, weights swapped in between.

The engine knows no text, environment or sample. One thread drives it: `submit`, `poll` until
outputs come, and between two polls, that is at a token boundary, `load` or `abort`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from umbra.proto.errors import UmbraError
from umbra.proto.records import Manifest, Routing, Sampling, Support, VersionSpan
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import SlotGuard

FinishReason = Literal["stop", "length", "abort"]
KvPolicy = Literal["keep", "recompute"]


class EngineError(UmbraError):
    """The engine is broken: nothing that it holds can be finished, and its process has to end."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Continue `prompt_ids` by at most `max_tokens` tokens; a stop token ends it and is kept.

    Requests of one `session` come one after the other, each beginning with the prompt and output of
    the one before; later ones may read the keys and values that earlier ones left.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    session: str = ""
    watched: bool = False  # its tokens are looked at as they come: what they say may end it


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The outcome of a request. T new tokens.

    `logprobs` are under the distribution that was sampled from, after temperature, top-k, top-p
    and min-p; under the plain softmax when `temperature` is 0 (greedy). `spans` cover `[0, T)`.
    `routing` covers the prompt's tokens and the new ones but the last, as far as they were read,
    if the engine was opened to report it. `support` covers the new tokens, where their
    distribution is cut off or the engine was opened to report a head.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    routing: Routing | None = None
    support: Support | None = None


class Engine(Protocol):
    """An inference engine with continuous batching."""

    version: int  # of the weights that it serves; -1 until `load` was called
    slots: int  # sequences decoded at once
    max_context: int  # prompt plus new tokens of a sequence at most

    @property
    def decoded_tokens(self) -> int: ...  # sampled so far, for throughput

    @property
    def busy(self) -> bool: ...  # `poll` has something to do

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests`.

        Raises:
            ValueError: a request that can't be served (see `check_request`); those before it are
                queued.
            EngineError: the engine is broken.
        """

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Make progress and return finished outputs; EngineError if the engine is broken."""
        ...

    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        guard: SlotGuard | None = None,
    ) -> None:
        """Serve `version` from the next token on.

        Args:
            manifest: the layout.
            data: the bytes of the version, `[manifest.total_bytes]`.
            version: of the weights.
            kv_policy: the fate of sequences in flight. Under "keep", the KV of a session stays
                valid for its own later requests, and for no other's.
            guard: of memory that others can write: verified before a token is sampled, and its
                errors pass. None where nobody can.

        Raises UsageError: the version does not fit the model; the old one is served, whole.
        """
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """End these requests (None: all) now; return their outputs so far."""
        ...

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        """Return the new tokens of the live requests, which grow and must not be changed.

        Asked after every step, so nothing is copied.
        """
        ...

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Return the outputs so far of these live requests, as aborted, and continue them."""
        ...

    def forget(self, session: str) -> None:
        """Drop the KV of a session that has no more requests."""

    def close(self) -> None:
        """Free what the engine holds."""


def check_request(request: EngineRequest, max_context: int, vocabulary: int) -> int:
    """Return the most tokens that `request` may get of an engine with these limits.

    Raises ValueError: it has no prompt, no room, unknown tokens, or sampling out of range; says
    which.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    room = max_context - len(prompt)
    if not prompt:
        raise ValueError("its prompt has no tokens")
    if room < 1 or request.max_tokens < 1:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {request.max_tokens} new ones do not fit a context "
            f"of {max_context}"
        )
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"its prompt has token {token}, but the model knows {vocabulary}: do tokenizer and "
                "model belong together?"
            )
    for name, fits, limits in (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "between 0 and 1"),
    ):
        if not fits:
            value = getattr(sampling, name)
            raise ValueError(f"sampling.{name} = {value:g} is out of range: use {limits}")
    return min(request.max_tokens, room)


def spans_of(starts: Sequence[tuple[int, int]], length: int) -> list[VersionSpan]:
    """Return the spans of `length` tokens: each version in `starts` begins at a token."""
    return [
        VersionSpan(version=version, start=start, end=end)
        for (version, start), (_, end) in pairwise([*starts, (0, length)])
        if end > start
    ]


def support_limit(sampling: Sampling, head: int) -> int:
    """Return of how many tokens at most the support of one is that is drawn by `sampling`.

    `head` is how many are told where nothing is cut off; 0 = none.
    """
    if sampling.temperature <= 0:
        return 0
    return sampling.top_k if sampling.cuts_off else head


def joined(supports: Sequence[Support | None]) -> Support | None:
    """Return the supports of tokens as one; None if they were not reported."""
    reported = [support for support in supports if support is not None]
    if not reported or len(reported) < len(supports):
        return None
    return Support(
        sizes=b"".join(support.sizes for support in reported),
        ids=b"".join(support.ids for support in reported),
        logprobs=b"".join(support.logprobs or b"" for support in reported) or None,
    )
