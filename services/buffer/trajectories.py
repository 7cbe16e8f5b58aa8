"""Is a trajectory what the protocol says it is? Nothing else may reach the trainer."""

from __future__ import annotations

import math

from umbra.proto.records import Trajectory, unpack_float32

ONES = b"\1" * (64 << 10)


def find_fault(trajectory: Trajectory, version: int) -> str | None:
    """What is wrong with `trajectory` at trainer version `version`; None when it is sound."""
    logprobs = {"logprobs": trajectory.logprobs}
    if trajectory.ref_logprobs is not None:
        logprobs["ref_logprobs"] = trajectory.ref_logprobs
    if trajectory.proximal_logprobs is not None:
        logprobs["proximal_logprobs"] = trajectory.proximal_logprobs
    return (
        _length_fault(trajectory, logprobs)
        or _span_fault(trajectory, version)
        or _value_fault(trajectory, logprobs)
    )


def _length_fault(trajectory: Trajectory, logprobs: dict[str, bytes]) -> str | None:
    tokens, rest = divmod(len(trajectory.response_ids), 4)
    if rest or len(trajectory.prompt_ids) % 4:
        return "token ids are not whole int32 values"
    if not tokens:
        return "no response tokens"
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


def _value_fault(trajectory: Trajectory, logprobs: dict[str, bytes]) -> str | None:
    mask = trajectory.loss_mask
    # Most masks are ones alone, and to compare takes a tenth of the time of the look for others.
    if not ONES.startswith(mask) and mask.translate(None, b"\0\1"):
        return "loss_mask has values other than 0 and 1"
    for name, data in logprobs.items():
        if not _all_finite(data):
            return f"{name} has values that are not finite"
    if not math.isfinite(trajectory.reward):
        return f"reward is {trajectory.reward}"
    parts = trajectory.reward_parts
    if parts and not all(map(math.isfinite, parts.values())):
        return "reward_parts has values that are not finite"
    return None


def _all_finite(data: bytes) -> bool:
    """Whether the float32 values in `data` are.

    Infinities and NaN have an exponent of ones, so their highest byte is 7f or ff. Few finite
    values have that, so it is worth a look at the highest bytes before all values are added up.
    """
    highest = data[3::4]
    if 0x7F not in highest and 0xFF not in highest:  # as numbers: ten times faster than as bytes
        return True
    # A sum is finite just when every term is: float32 values cannot overflow a double here.
    return math.isfinite(sum(unpack_float32(data)))
