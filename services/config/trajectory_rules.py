"""The rules for a sound trajectory: one set for all its readers.

The buffer applies them before it acknowledges, so that nothing is stored that a scorer or the
trainer would refuse; these apply them again to what they are given, since a store may be older than
a rule. Masks and logprobs are judged by bytes alone, which is quicker than as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from umbra.proto.bounds import PARTS, SUPPORT_BYTES, TOKENS
from umbra.proto.records import Sampling, Trajectory, unpack_int32
from umbra.services.config import NamedEnvironment, RunConfig
from umbra.services.config.generation import environment_of, sampling_of

MOST_VOCABULARY = 1 << 24  # tokens of any model, until the run's is known
MOST_TOKENS = 1 << 22  # of any trajectory
MOST_REWARD = 1e9  # its square is a float32 still
MOST_TEMPERATURE, LEAST_TEMPERATURE = 1e6, 1e-6  # logits over it are float32 numbers
MOST_TURNS = 1_000_000
MOST_NAME = 100  # characters
LATEST = 1e12  # seconds since the epoch
MOST_VERSION = 1 << 31
MOST_ROUTERS = 1 << 10  # layers that have one
MOST_EXPERTS = 1 << 15  # of a layer: their numbers are int16 to the trainer

ONES = b"\1" * (64 << 10)

# Highest bytes of float32 logprobs that can be. Nothing is above 0 but for rounding (2**-7, as in
# bfloat16). Nobody samples a token of a probability below e**-128, though a policy may find that
# of another's token to be as small as it likes: what scorers find goes down to -2**17.
_ROUNDING = bytes(range(0x3C))
_SAMPLED = _ROUNDING + bytes(range(0x80, 0xC3))
_SCORED = _ROUNDING + bytes(range(0x80, 0xC8))


RouterKind = tuple[int, int, int]  # layers that have one, experts of a token, experts of a layer


@dataclass(slots=True)
class RunFacts:
    """Facts of the run's model and of its sampling.

    The buffer learns `vocabulary` and `routers` from the trainer; until then bounds stand in for
    them.
    """

    vocabulary: int = MOST_VOCABULARY  # token ids are below it
    tokens: int = MOST_TOKENS  # prompt and response tokens of a trajectory, at most
    # What samples to train on are drawn by, for each environment (`samplings_of`); none = anything.
    samplings: Mapping[str, Sampling] = field(default_factory=dict[str, Sampling])
    routing: bool | None = None  # whether samples to train on have one; None = either
    routers: RouterKind | None = None  # of the trainer's model; None = unknown
    centered: bool = False  # whether samples to train on say what the sampler's likeliest were

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int = MOST_VOCABULARY) -> RunFacts:
        """Return the facts in `config`, without the sampling, which may change when a run resumes.

        An environment may say more after the last turn than fits the context, hence the factor.
        """
        tokens = min(MOST_TOKENS, 2 * config.generator.max_context)
        centered = config.trainer.score_centering > 0
        return cls(vocabulary, tokens, routing=config.trainer.router_replay, centered=centered)

    def sampling_of(self, prompt_id: str) -> Sampling | None:
        return self.samplings.get(environment_of(prompt_id)) or self.samplings.get("")

    def learn(self, vocabulary: int, routers: RouterKind | None = None) -> None:
        """Take over the vocabulary and routers of the trainer's model; 0 and None are unknown."""
        if 0 < vocabulary <= MOST_VOCABULARY:
            self.vocabulary = vocabulary
        if routers is not None:
            self.routers = routers


def samplings_of(config: RunConfig) -> dict[str, Sampling]:
    return {
        one.name if isinstance(one, NamedEnvironment) else "": sampling_of(config.sampling_for(one))
        for one in config.all_environments
    }


def find_fault(
    trajectory: Trajectory,
    facts: RunFacts,
    version: int = MOST_VERSION,
    *,
    trained: bool = True,
) -> str | None:
    """Return the fault of `trajectory`, or of one of its lines; None when it is sound.

    Args:
        version: newest that there is of the policy.
        trained: it is to be trained on, and not of an evaluation, which may be greedy.
    """
    if trajectory.branches:
        return _branches_fault(trajectory, facts, version, trained)
    tokens = trajectory.response_tokens
    expected = facts.sampling_of(trajectory.prompt_id) if trained else None
    return (
        _length_fault(trajectory, facts)
        or _span_fault(trajectory, version)
        or _token_fault(trajectory, facts)
        or _mask_fault(trajectory.loss_mask)
        or _logprob_fault("logprobs", trajectory.logprobs, tokens, _SAMPLED)
        or _logprob_fault("ref_logprobs", trajectory.ref_logprobs, tokens)
        or _logprob_fault("proximal_logprobs", trajectory.proximal_logprobs, tokens)
        or _support_fault(trajectory, facts, trained)
        or reward_fault(trajectory.reward, trajectory.reward_parts)
        or _sampling_fault(trajectory.sampling, expected, trained)
        or _plain_fault(trajectory)
        or _routing_fault(trajectory, facts, trained)
    )


def _branches_fault(
    trajectory: Trajectory, facts: RunFacts, version: int, trained: bool
) -> str | None:
    lines, tokens = trajectory.lines, trajectory.sample_tokens
    if tokens > TOKENS:
        return f"its {len(lines)} branches have {tokens} response tokens, {TOKENS} at most"
    if trajectory.routing is not None:
        return f"it has {len(lines)} branches, and routing, which fits one only"
    if sum(len(line.support.ids) for line in lines if line.support is not None) > SUPPORT_BYTES:
        return f"the support of its {len(lines)} branches has more than {SUPPORT_BYTES} bytes"
    scored = (trajectory.ref_logprobs, trajectory.proximal_logprobs)
    if any(data is not None and len(data) != 4 * tokens for data in scored):
        return f"ref_logprobs or proximal_logprobs do not fit {len(lines)} branches"
    for number, line in enumerate(lines):
        if fault := find_fault(line, facts, version, trained=trained):
            return f"branch {number + 1} of {len(lines)}: {fault}"
    return None


def reward_fault(reward: float, parts: dict[str, float], reason: str = "stop") -> str | None:
    if not -MOST_REWARD <= reward <= MOST_REWARD:  # nor is it where it is NaN
        return f"reward is {reward}, which is not within {MOST_REWARD:g}"
    if not _is_name(reason):
        return f"reason must be a short name, not {reason[:MOST_NAME]!r}"
    if len(parts) > PARTS:
        return f"reward_parts has {len(parts)} names, {PARTS} at most are kept"
    for name, value in parts.items():
        if not -MOST_REWARD <= value <= MOST_REWARD:
            return f"reward part {name[:MOST_NAME]!r} is {value}, not within {MOST_REWARD:g}"
        if not name or not _is_name(name):
            return f"reward part {name[:MOST_NAME]!r} has no short, printable name"
    return None


def _length_fault(trajectory: Trajectory, facts: RunFacts) -> str | None:
    tokens, remainder = divmod(len(trajectory.response_ids), 4)
    prompt, prompt_rest = divmod(len(trajectory.prompt_ids), 4)
    if remainder or prompt_rest:
        return "token ids are not whole int32 values"
    if not tokens:
        return "no response tokens"
    if not prompt:
        return "no prompt tokens"
    if prompt + tokens > facts.tokens:
        return f"{prompt + tokens} tokens, {facts.tokens} at most (twice generator.max_context)"
    if len(trajectory.loss_mask) != tokens:
        return f"loss_mask has {len(trajectory.loss_mask)} entries for {tokens} response tokens"
    return None


def _span_fault(trajectory: Trajectory, version: int) -> str | None:
    end = 0
    for span in trajectory.spans:
        if span.start != end or span.end <= span.start:
            return f"span [{span.start}, {span.end}) does not follow token {end}"
        if not 0 <= span.version <= version:
            return f"span of version {span.version}, but only 0 to {version} exist"
        end = span.end
    if end != trajectory.response_tokens:
        return f"spans end at token {end} of {trajectory.response_tokens}"
    return None


def _token_fault(trajectory: Trajectory, facts: RunFacts) -> str | None:
    for name in ("prompt_ids", "response_ids"):
        if not _all_below(data := getattr(trajectory, name), facts.vocabulary):
            values = unpack_int32(data)
            return (
                f"{name} reach from {min(values)} to {max(values)}, but the model has "
                f"{facts.vocabulary} tokens: do generator and trainer use the same model?"
            )
    return None


def _all_below(values: bytes, bound: int, kind: str = "<u4") -> bool:
    """Return whether integers are 0 to `bound` - 1; negative ones are large as unsigned ones."""
    return not values or bool(np.frombuffer(values, kind).max() < bound)


def _mask_fault(mask: bytes) -> str | None:
    # Most masks are ones alone, and to compare takes a tenth of the time of the look for others.
    if ONES.startswith(mask):
        return None
    if mask.translate(None, b"\0\1"):
        return "loss_mask has values other than 0 and 1"
    return None if 1 in mask else "loss_mask has no token to learn from"


def scored_fault(logprobs: bytes | None, tokens: int) -> str | None:
    """Return the fault of the logprobs that a scorer found for `tokens` response tokens."""
    return _logprob_fault("logprobs", logprobs or b"", tokens)


def _logprob_fault(
    name: str, data: bytes | None, tokens: int, allowed: bytes = _SCORED
) -> str | None:
    """Sign and exponent, or all but one bit of it, are in the highest byte of a float32."""
    if data is None:
        return None
    if len(data) != 4 * tokens:
        return f"{name} has {len(data)} bytes for {tokens} tokens"
    if not data[3::4].translate(None, allowed):
        return None
    low = -(2**7) if allowed is _SAMPLED else -(2**17)
    return f"{name} has values that are not finite, above 0 or below {low}"


@lru_cache(maxsize=64)  # the answers of an environment say the same, nearly always
def _sampling_fault(sampling: Sampling, expected: Sampling | None, trained: bool) -> str | None:
    temperature = sampling.temperature
    if trained and temperature == 0:
        return "temperature 0 has no logprobs to learn from"
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        return f"temperature is {temperature}"
    top_p, top_k, min_p = sampling.top_p, sampling.top_k, sampling.min_p
    if not (0 < top_p <= 1 and 0 <= top_k < MOST_VOCABULARY and 0 <= min_p <= 1):
        return f"top_p, top_k or min_p is out of range: {sampling}"
    drawn = sampling.distribution
    if expected is None or drawn == expected.distribution:
        return None
    runs = expected.distribution
    return f"(temperature, top_p, top_k, min_p) are {drawn}, the run samples with {runs}"


def _plain_fault(trajectory: Trajectory) -> str | None:
    if not 0 <= trajectory.turns <= MOST_TURNS:
        return f"turns is {trajectory.turns}"
    if not -1 <= trajectory.proximal_version <= MOST_VERSION:
        return f"proximal_version is {trajectory.proximal_version}"
    if not (_is_name(trajectory.finish_reason) and _is_name(trajectory.generator)):
        return "finish_reason or generator is no short name"
    begin, end = trajectory.started_at, trajectory.finished_at
    if not (-LATEST <= begin <= LATEST and -LATEST <= end <= LATEST):  # nor is it where it is NaN
        return f"started_at and finished_at are {(begin, end)}"
    return None


def _routing_fault(trajectory: Trajectory, facts: RunFacts, trained: bool) -> str | None:
    routing = trajectory.routing
    if routing is None:
        needed = facts.routing and trained
        return "it has no routing, which trainer.router_replay needs" if needed else None
    if facts.routing is False:
        return "it has routing, but trainer.router_replay is off"
    actual = layers, choices, experts = (routing.layers, routing.choices, routing.experts)
    if facts.routers is not None and actual != facts.routers:
        return (
            f"(layers, experts of a token, experts of a layer) of its routing are {actual}, of "
            f"the trainer's model {facts.routers}: do generator and trainer use the same model?"
        )
    if not (0 < layers <= MOST_ROUTERS and 0 < choices <= experts <= MOST_EXPERTS):
        return f"routing of {layers} layers to {choices} of {experts} experts"
    covered, rest = divmod(len(routing.chosen), routing.token_bytes)
    if rest:
        return f"routing has {len(routing.chosen)} bytes, no multiple of {routing.token_bytes}"
    if not _all_below(routing.chosen, experts, "<u2" if experts > 256 else "u1"):
        return f"routing names experts beyond {experts - 1}"
    # Of all tokens before a learned one; the last token needs none.
    prompt = len(trajectory.prompt_ids) // 4
    least = prompt + trajectory.loss_mask.rfind(1)
    most = prompt + trajectory.response_tokens - 1
    if least <= covered <= most:
        return None
    return f"routing is of {covered} tokens, {least} to {most} are needed"


def _support_fault(trajectory: Trajectory, facts: RunFacts, trained: bool) -> str | None:
    support, cut = trajectory.support, trajectory.sampling.cuts_off
    if support is None:
        key = "top_p, top_k, min_p" if cut else "trainer.score_centering"
        needed = trained and (cut or facts.centered)
        return f"it has no support, which {key} needs" if needed else None
    if len(support.sizes) != 2 * trajectory.response_tokens:
        return f"support.sizes has {len(support.sizes)} bytes, which do not match the response"
    sizes = np.frombuffer(support.sizes, "<u2").astype(np.intp)
    if len(support.ids) != 4 * sizes.sum() or (sizes > 0).tobytes() != trajectory.loss_mask:
        return "support has other tokens than its sizes say, or than loss_mask has"
    if not _all_below(support.ids, facts.vocabulary):
        return f"support has ids beyond the {facts.vocabulary} tokens of the model"
    if trained and facts.centered and not support.logprobs:
        return "support has no logprobs, which trainer.score_centering needs"
    fault = _logprob_fault("support.logprobs", support.logprobs or None, len(support.ids) // 4)
    return fault or (_drawn_fault(trajectory, support.ids, sizes[sizes > 0]) if cut else None)


def _drawn_fault(trajectory: Trajectory, ids: bytes, sizes: NDArray[np.intp]) -> str | None:
    """Return the fault of a learned token outside its support: so many `ids` for each."""
    learned = np.frombuffer(trajectory.loss_mask, bool)
    drawn = np.frombuffer(trajectory.response_ids, "<i4")[learned]
    found = np.frombuffer(ids, "<i4") == drawn.repeat(sizes)
    missing = ~np.logical_or.reduceat(found, np.cumsum(sizes) - sizes)
    if missing.any():
        return f"its sampled token {missing.argmax()} is outside of its support"
    return None


def _is_name(text: str) -> bool:
    return len(text) <= MOST_NAME and text.isprintable()
