"""Trajectories as tensors, refused with a clear error where they do not add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.proto.errors import UmbraError
from umbra.proto.records import Trajectory
from umbra.services.modeling.packing import Tokens


class BatchError(UmbraError):
    """A trajectory that cannot be trained on; the text names its sample."""


@dataclass(frozen=True, slots=True)
class Batch:
    """S samples with M learned tokens."""

    trajectories: list[Trajectory]
    tokens: Tokens
    rewards: Tensor  # float64 [S]
    groups: Tensor  # int64 [S], counted from 0 in order of appearance
    behaviour: Tensor  # float32 [M], logprobs under the policy that sampled
    temperature: Tensor  # float32 [M]

    @property
    def oldest(self) -> Tensor:
        """Version of the oldest token of the sample that each learned token is of, int64 [M]."""
        return torch.tensor([t.oldest_version for t in self.trajectories])[self.tokens.owner]

    def leading(self, version: int) -> Tensor:
        """Which learned tokens `version` sampled from the beginning of their response on, bool [M].

        Their whole context was read by these very weights. That is not known of tokens after a
        change of version: under `generator.kv_policy` = keep the cache before them is of older
        weights, so that their logprobs are of no version alone.
        """
        tokens = self.tokens
        assert tokens.prompts is not None
        first = [t.spans[0] for t in self.trajectories]
        ends = torch.tensor([span.end if span.version == version else 0 for span in first])
        starts = tokens.lengths.cumsum(0) - tokens.lengths + tokens.prompts
        return tokens.learned - starts[tokens.owner] < ends[tokens.owner]


def make_batch(trajectories: list[Trajectory], vocab_size: int) -> Batch:
    """The tensors of `trajectories`.

    Raises:
        BatchError: lengths that differ, logprobs or rewards that are missing or not finite, token
            ids outside the vocabulary, spans with gaps; it names the sample.
    """
    if not trajectories:
        raise BatchError("the batch has no trajectories")
    ids: list[NDArray[np.int64]] = []
    learned: list[NDArray[np.int64]] = []
    behaviour: list[NDArray[np.float32]] = []
    start = 0
    for trajectory in trajectories:
        prompt = _array(trajectory, "prompt_ids", "<i4")
        response = _array(trajectory, "response_ids", "<i4")
        mask = _array(trajectory, "loss_mask", "u1").astype(bool)
        logprobs = _array(trajectory, "logprobs", "<f4")
        _check(trajectory, prompt, response, mask, logprobs, vocab_size)
        ids += [prompt.astype(np.int64), response.astype(np.int64)]
        learned.append(np.flatnonzero(mask) + (start + len(prompt)))
        behaviour.append(logprobs[mask].astype(np.float32))
        start += len(prompt) + len(response)
    counts = torch.tensor([len(positions) for positions in learned])
    owner = torch.arange(len(trajectories)).repeat_interleave(counts)
    number: dict[str, int] = {}
    family: dict[bytes, int] = {}
    temperatures = torch.tensor([t.sampling.temperature for t in trajectories])
    return Batch(
        trajectories=trajectories,
        tokens=Tokens(
            ids=torch.from_numpy(np.concatenate(ids)),
            lengths=torch.tensor(
                [(len(t.prompt_ids) + len(t.response_ids)) // 4 for t in trajectories]
            ),
            learned=torch.from_numpy(np.concatenate(learned)),
            owner=owner,
            prompts=torch.tensor([len(t.prompt_ids) // 4 for t in trajectories]),
            family=torch.tensor(
                [family.setdefault(t.prompt_ids, len(family)) for t in trajectories]
            ),
        ),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
        groups=torch.tensor([number.setdefault(t.group_id, len(number)) for t in trajectories]),
        behaviour=torch.from_numpy(np.concatenate(behaviour)),
        temperature=temperatures[owner],
    )


def _array(trajectory: Trajectory, field: str, dtype: str) -> NDArray[np.generic]:
    data: bytes = getattr(trajectory, field)
    if len(data) % np.dtype(dtype).itemsize:
        raise _error(trajectory, f"{field} has {len(data)} bytes, not a whole number of {dtype}")
    return np.frombuffer(data, dtype)


def _check(
    trajectory: Trajectory,
    prompt: NDArray[np.generic],
    response: NDArray[np.generic],
    mask: NDArray[np.bool_],
    logprobs: NDArray[np.generic],
    vocab_size: int,
) -> None:
    length = len(response)
    if not len(prompt) or not length:
        raise _error(trajectory, f"{len(prompt)} prompt and {length} response tokens")
    for field, array in (("loss_mask", mask), ("logprobs", logprobs)):
        if len(array) != length:
            raise _error(trajectory, f"{len(array)} entries in {field} for {length} tokens")
    if not np.isfinite(logprobs[mask]).all():
        raise _error(trajectory, "a logprob of a learned token is not finite")
    if not math.isfinite(trajectory.reward):
        raise _error(trajectory, f"the reward is {trajectory.reward}")
    for field, array in (("prompt_ids", prompt), ("response_ids", response)):
        if int(array.min()) < 0 or int(array.max()) >= vocab_size:
            raise _error(
                trajectory,
                f"{field} reach from {array.min()} to {array.max()}, but the model has "
                f"{vocab_size} tokens: do generator and trainer use the same model?",
            )
    if trajectory.sampling.temperature <= 0:
        raise _error(trajectory, "temperature 0 has no logprobs to learn from")
    end = 0
    for span in trajectory.spans:
        if span.start != end or span.end <= span.start:
            raise _error(trajectory, f"version spans do not cover its tokens in order at {end}")
        end = span.end
    if end != length:
        raise _error(trajectory, f"version spans cover {end} of {length} tokens")


def _error(trajectory: Trajectory, reason: str) -> BatchError:
    return BatchError(f"sample {trajectory.sample_id} of {trajectory.generator or '?'}: {reason}")
