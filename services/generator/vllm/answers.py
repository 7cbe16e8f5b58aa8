"""Answers of a vLLM server over HTTP, as read in vLLM 0.32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from umbra.proto.errors import UNREADABLE, PeerLostError, UsageError
from umbra.proto.records import Sampling, Support, VersionSpan, pack_float32, pack_int32
from umbra.services.generator.engines.engine import EngineError, told_of
from umbra.services.generator.vllm.plugin import BACKEND

_NO_LOGPROB = -9999.0  # vLLM's number for none, and for one that is not finite

T = TypeVar("T")


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None  # from 1 on


class _Drawn(_Candidate):
    top_logprobs: list[_Candidate] = []  # itself, then the likeliest


class _Logprobs(msgspec.Struct):
    content: list[_Drawn] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class NewTokens(msgspec.Struct):
    """New tokens of a request, and the versions of all so far; the last has `finish_reason`."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None

    def logprobs_of(
        self, sampling: Sampling, head: int
    ) -> tuple[list[float], list[Support | None]]:
        """Return the logprob and the support of each token; `head` is as of `told_of`.

        Raises:
            EngineError: one is not finite.
            PeerLostError: some are missing.
        """
        drawn = (self.logprobs.content if self.logprobs is not None else None) or []
        if len(drawn) != len(self.token_ids or ()):
            raise PeerLostError(
                f"{len(drawn)} logprobs came for {len(self.token_ids or ())} tokens"
            )
        if any(one.logprob <= _NO_LOGPROB for one in drawn):
            raise EngineError("a vLLM server's logits are not finite")
        told = told_of(sampling, head)
        supports = [_support(one, sampling, head, told) if told else None for one in drawn]
        return [one.logprob for one in drawn], supports

    def spans_of(self, length: int, versions: Mapping[str, int]) -> list[VersionSpan] | None:
        """Return the spans of all `length` tokens so far; None if one is of none of `versions`."""
        told = [one for one in self.weight_versions or () if one.end > one.start]
        ends = [0, *(one.end for one in told)]
        known = all(one.version in versions for one in told)
        if not known or [*(one.start for one in told), length] != ends:
            return None
        return [
            VersionSpan(version=versions[one.version], start=one.start, end=one.end) for one in told
        ]


def _support(drawn: _Drawn, sampling: Sampling, head: int, told: int) -> Support:
    """Return the tokens that could have been drawn; without a cut-off, the `told` likeliest."""
    finite = [one for one in drawn.top_logprobs if one.logprob > _NO_LOGPROB]
    if not sampling.cuts_off:
        finite = [one for one in finite if one.rank is not None and one.rank <= told]
    kept = {one.token_id: one.logprob for one in finite}
    if sampling.cuts_off:
        kept.setdefault(drawn.token_id, drawn.logprob)
    values = pack_float32([*kept.values()]) if head else None
    sizes = len(kept).to_bytes(2, "little")
    return Support(sizes=sizes, ids=pack_int32([*kept]), logprobs=values)


class TokenEvent(msgspec.Struct):
    """One of the stream that POST /inference/v1/generate answers."""

    choices: list[NewTokens] = []
    error: Any = None


def read(answer: bytes, kind: type[T]) -> T:
    """Raise PeerLostError if `answer` is not the JSON of such a thing."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNREADABLE as error:
        raise PeerLostError(f"a server answers unlike vLLM 0.32: {error}") from error


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Settings that a server was started with, of GET /server_info?config_format=json."""

    dtype: str
    seed: int
    platform: str
    faults: Sequence[str]  # why it would serve wrong

    def faults_beside(self, other: ServerFacts) -> Iterator[str]:
        """Yield why it would serve wrong beside another server."""
        if other.dtype != self.dtype:
            yield f"it computes in {self.dtype}, another one in {other.dtype}"
        if other.seed == self.seed:
            yield f"another one has --seed {self.seed} too and would draw the same: change one"


def facts_in(answer: bytes, max_context: int) -> ServerFacts:
    """Read the facts; `max_context` is the generator's."""
    config: Any = read(answer, dict[str, Any]).get("vllm_config")
    try:
        model, transfer = config["model_config"], config["weight_transfer_config"] or {}
        wrong = (
            (
                transfer.get("backend") != BACKEND,
                f'it does not load weights by "{BACKEND}": install umbra-rl beside its vLLM, and '
                f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
            ),
            (
                model["logprobs_mode"] != "processed_logprobs",
                "its logprobs are not those it samples by: --logprobs-mode processed_logprobs",
            ),
            (
                model["max_model_len"] < max_context,
                f"its --max-model-len {model['max_model_len']} is less than "
                f"generator.max_context = {max_context}",
            ),
            (
                model["quantization"] is not None,
                f"its quantization {model['quantization']} was not tried with new weights",
            ),
            (
                config["parallel_config"]["data_parallel_size"] > 1,
                "start a server for each data-parallel rank, and name all in generator.urls",
            ),
            (
                config["speculative_config"] is not None,
                "its logprobs would be wrong with a speculative_config: leave it out",
            ),
        )
        return ServerFacts(
            model["dtype"].removeprefix("torch."),
            model["seed"],
            config["device_config"]["device"],
            [sentence for is_so, sentence in wrong if is_so],
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"a server's /server_info is unlike vLLM 0.32's: {error!r}") from error
