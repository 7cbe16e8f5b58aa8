"""What a trajectory must be: one set of rules for all who read one.

The buffer applies them before it acknowledges, so that nothing is stored that a scorer or the
trainer would refuse; these apply them again to what they are given, since a store may be older than
a rule. No numpy: the buffer has none, and a look costs it a few microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from umbra.proto.records import Sampling, Trajectory, unpack_int32
from umbra.services.runtime.config import RunConfig, SamplingConfig

MOST_VOCABULARY = 1 << 24  # tokens of any model, until that of the run's is known
MOST_TOKENS = 1 << 22  # of any trajectory
MOST_REWARD = 1e9  # its square is a float32 still
MOST_TEMPERATURE, LEAST_TEMPERATURE = 1e6, 1e-6  # logits over it are float32 numbers
MOST_TURNS = 1_000_000
MOST_PARTS = 64  # of a reward; each becomes a column of the step's metrics
MOST_NAME = 100  # characters
LATEST = 1e12  # seconds since the epoch
MOST_VERSION = 1 << 31

ONES = b"\1" * (64 << 10)
ZEROS = bytes(64 << 10)
LANES = 1024  # tokens that are compared at once

_NUMBERS = bytes(range(256))
# Highest bytes of float32 logprobs that can be. Nothing is above 0 but for rounding (2**-7, as in
# bfloat16). Nobody samples a token of a probability below e**-128, though a policy may find that
# of another's token to be as small as it likes: what scorers find goes down to -2**17.
_ROUNDING = bytes(range(0x3C))
_SAMPLED = _ROUNDING + bytes(range(0x80, 0xC3))
_SCORED = _ROUNDING + bytes(range(0x80, 0xC8))


@dataclass(slots=True)
class RunFacts:
    """What is known of the run's model and of how it samples.

    The buffer learns `vocabulary` from the trainer; until then a bound stands in for it.
    """

    vocabulary: int = MOST_VOCABULARY  # token ids are below it
    tokens: int = MOST_TOKENS  # prompt and response tokens of a trajectory, at most
    sampling: Sampling | None = None  # what samples to train on are drawn by; None = anything

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int = MOST_VOCABULARY) -> RunFacts:
        """The facts in `config`, without the sampling, which may change when a run goes on.

        An environment may say more after the last turn than fits the context, hence the factor.
        """
        return cls(vocabulary, min(MOST_TOKENS, 2 * config.generator.max_context))

    def learn(self, vocabulary: int) -> None:
        """The trainer's model has so many tokens; 0 if it has not said."""
        if 0 < vocabulary <= MOST_VOCABULARY:
            self.vocabulary = vocabulary


def sampling_of(config: SamplingConfig, *, greedy: bool = False) -> Sampling:
    """The wire record of the configured sampling; `greedy` is temperature 0."""
    return Sampling(
        temperature=0.0 if greedy else config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
    )


def find_fault(
    trajectory: Trajectory,
    facts: RunFacts,
    version: int = MOST_VERSION,
    *,
    trained: bool = True,
) -> str | None:
    """What is wrong with `trajectory`; None when it is sound.

    Args:
        version: newest that there is of the policy.
        trained: it is to be trained on, and not of an evaluation, which may be greedy.
    """
    logprobs = {"logprobs": trajectory.logprobs}
    if trajectory.ref_logprobs is not None:
        logprobs["ref_logprobs"] = trajectory.ref_logprobs
    if trajectory.proximal_logprobs is not None:
        logprobs["proximal_logprobs"] = trajectory.proximal_logprobs
    return (
        _length_fault(trajectory, logprobs, facts)
        or _span_fault(trajectory, version)
        or _token_fault(trajectory, facts)
        or _value_fault(trajectory, logprobs)
        or reward_fault(trajectory.reward, trajectory.reward_parts)
        or _sampling_fault(trajectory.sampling, facts.sampling if trained else None, trained)
        or _plain_fault(trajectory)
    )


def reward_fault(reward: float, parts: dict[str, float]) -> str | None:
    """What is wrong with a reward and its parts; None when they are sound."""
    if not -MOST_REWARD <= reward <= MOST_REWARD:  # nor is it where it is NaN
        return f"reward is {reward}, which is not within {MOST_REWARD:g}"
    if not parts:
        return None
    if len(parts) > MOST_PARTS:
        return f"reward_parts has {len(parts)} names, {MOST_PARTS} at most are kept"
    for name, value in parts.items():
        if not -MOST_REWARD <= value <= MOST_REWARD:
            return f"reward_parts has {value} for {name[:MOST_NAME]!r}"
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            return f"reward_parts has the name {name[:MOST_NAME]!r}"
    return None


def scored_fault(logprobs: bytes | None, tokens: int) -> str | None:
    """What is wrong with the logprobs that a scorer found for `tokens` response tokens."""
    if logprobs is None or len(logprobs) != 4 * tokens:
        return f"logprobs have {len(logprobs or b'')} bytes for {tokens} response tokens"
    return _logprob_fault("logprobs", logprobs, _SCORED)


def _length_fault(
    trajectory: Trajectory, logprobs: dict[str, bytes], facts: RunFacts
) -> str | None:
    tokens, rest = divmod(len(trajectory.response_ids), 4)
    prompt, prompt_rest = divmod(len(trajectory.prompt_ids), 4)
    if rest or prompt_rest:
        return "token ids are not whole int32 values"
    if not tokens:
        return "no response tokens"
    if not prompt:
        return "no prompt tokens"
    if prompt + tokens > facts.tokens:
        return f"{prompt + tokens} tokens, {facts.tokens} at most (twice generator.max_context)"
    if len(trajectory.loss_mask) != tokens:
        return f"loss_mask has {len(trajectory.loss_mask)} entries for {tokens} response tokens"
    for name, data in logprobs.items():
        if len(data) != 4 * tokens:
            return f"{name} has {len(data)} bytes for {tokens} response tokens"
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
    for name, data in (
        ("prompt_ids", trajectory.prompt_ids),
        ("response_ids", trajectory.response_ids),
    ):
        if not _all_below(data, facts.vocabulary):
            values = unpack_int32(data)
            return (
                f"{name} reach from {min(values)} to {max(values)}, but the model has "
                f"{facts.vocabulary} tokens: do generator and trainer use the same model?"
            )
    return None


def _all_below(ids: bytes, bound: int) -> bool:
    """Whether the int32 `ids` are at least 0 and below `bound`, which is at most 2**24.

    Most are below already by their second highest byte, if the highest is 0; or by the third, of a
    small vocabulary, if both are 0. Else many are compared at once, as lanes of one large number:
    what is added to each carries those that are too large to its highest bit, where negative ones
    have theirs already.
    """
    if ZEROS.startswith(ids[3::4]):
        if bound >> 16:
            if not ids[2::4].translate(None, _NUMBERS[: bound >> 16]):
                return True
        elif ZEROS.startswith(ids[2::4]) and not ids[1::4].translate(None, _NUMBERS[: bound >> 8]):
            return True
    added, highest = _lanes(bound)
    for start in range(0, len(ids), 4 * LANES):
        number = int.from_bytes(ids[start : start + 4 * LANES], "little")
        if (number | (number + added)) & highest:
            return False
    return True


@lru_cache(maxsize=8)
def _lanes(bound: int) -> tuple[int, int]:
    """For each of `LANES` lanes of 32 bits: what lifts `bound` to 2**31, and the highest bit."""
    ones = sum(1 << 32 * lane for lane in range(LANES))
    return ones * ((1 << 31) - bound), ones << 31


def _value_fault(trajectory: Trajectory, logprobs: dict[str, bytes]) -> str | None:
    mask = trajectory.loss_mask
    # Most masks are ones alone, and to compare takes a tenth of the time of the look for others.
    if not ONES.startswith(mask):
        if mask.translate(None, b"\0\1"):
            return "loss_mask has values other than 0 and 1"
        if 1 not in mask:
            return "loss_mask has no token to learn from"
    for name, data in logprobs.items():
        fault = _logprob_fault(name, data, _SAMPLED if name == "logprobs" else _SCORED)
        if fault is not None:
            return fault
    return None


def _logprob_fault(name: str, data: bytes, allowed: bytes) -> str | None:
    """Sign and exponent, or all but one bit of it, are in the highest byte of a float32."""
    if not data[3::4].translate(None, allowed):
        return None
    low = -(2**7) if allowed is _SAMPLED else -(2**17)
    return f"{name} has values that are not finite, above 0 or below {low}"


def _sampling_fault(given: Sampling, wanted: Sampling | None, trained: bool) -> str | None:
    temperature = given.temperature
    if trained and temperature == 0:
        return "temperature 0 has no logprobs to learn from"
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        return f"temperature is {temperature}"
    if not (0 < given.top_p <= 1 and 0 <= given.top_k < MOST_VOCABULARY and 0 <= given.min_p <= 1):
        return f"top_p, top_k or min_p is out of range: {given}"
    if wanted is None:
        return None
    found = (temperature, given.top_p, given.top_k, given.min_p)
    asked = (wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p)
    if found != asked:
        return f"(temperature, top_p, top_k, min_p) are {found}, the run samples with {asked}"
    return None


def _plain_fault(trajectory: Trajectory) -> str | None:
    """What tensors and columns are made of, or a log tells."""
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


def _is_name(text: str) -> bool:
    return len(text) <= MOST_NAME and text.isprintable()
