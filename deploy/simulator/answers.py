"""Trajectories of simulated samples: as sound as real ones to the broker, but small.

What the broker decides by is in the version spans and the reward, so a trajectory has one token for
each policy version in it. How many tokens it stands for is in `reward_parts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import xxhash

from umbra.proto.records import SampleTask, Trajectory, VersionSpan

BYTES_PER_TOKEN = 9  # of a response: id, logprob, mask
BYTES_PER_PROMPT_TOKEN = 4
_TOKENS, _PROMPT = "tokens", "prompt"


class _TrajectoryHead(msgspec.Struct):
    """What the simulator looks at of a trajectory that is packed."""

    reward_parts: dict[str, float]
    spans: list[VersionSpan]


_decode = msgspec.msgpack.Decoder(_TrajectoryHead).decode


def make_answer(
    task: SampleTask, versions: Sequence[int], tokens: int, prompt: int, reward: float
) -> Trajectory:
    """What there is of a sample whose `tokens` are of `versions`, in order."""
    count = len(versions)
    return Trajectory(
        sample_id=task.sample_id,
        group_id=task.group_id,
        prompt_id=task.prompt_id,
        attempt=task.attempt,
        prompt_ids=bytes(4),
        response_ids=bytes(4 * count),
        loss_mask=b"\1" * count,
        logprobs=bytes(4 * count),
        spans=[
            VersionSpan(version=version, start=index, end=index + 1)
            for index, version in enumerate(versions)
        ],
        finish_reason="stop",
        reward=reward,
        reward_parts={_TOKENS: float(tokens), _PROMPT: float(prompt)},
    )


def size_of(trajectory: Trajectory) -> tuple[float, float]:
    """Response and prompt tokens that it stands for; also of one that is packed."""
    parts = _look(trajectory).reward_parts
    return parts[_TOKENS], parts[_PROMPT]


def versions_of(trajectory: Trajectory) -> list[int]:
    """The policy versions of its tokens, in order; also of one that is packed."""
    return [span.version for span in _look(trajectory).spans]


def _look(trajectory: Trajectory) -> Trajectory | _TrajectoryHead:
    packed = cast(Any, trajectory)
    return _decode(packed) if isinstance(packed, msgspec.Raw) else trajectory


class Chance:
    """Numbers from 0 to 1 that depend on the seed and a name alone, whoever asks, and when."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, name: str) -> float:
        """The number of `name`."""
        return xxhash.xxh3_64_intdigest(name.encode(), seed=self._seed) / 2**64
