"""Trajectories as tensors, refused with a clear error where they do not add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbra.proto.errors import UmbraError
from umbra.proto.records import Trajectory
from umbra.services.config.trajectory_rules import MOST_TOKENS, RouterKind, RunFacts, find_fault
from umbra.services.modeling.micro_batch import Tokens


class BatchError(UmbraError):
    """Trajectories that cannot be trained on; the text names the first of these samples."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """S samples of L lines in all, with M learned tokens. Most samples are one line.

    A line is a sequence to the model and to the objective. One of k lines of a sample has weight
    1 / k in every sum and mean, so that the sample counts once.
    """

    samples: list[Trajectory]  # S, as they came
    trajectories: list[Trajectory]  # L, the lines of all samples in order
    sample: Tensor  # int64 [L], whose line each is, ascending
    weight: Tensor  # float64 [L]
    tokens: Tokens  # of the lines
    rewards: Tensor  # float64 [S]
    groups: Tensor  # int64 [S], counted from 0 in order of appearance
    behaviour: Tensor  # float32 [M], logprobs under the policy that sampled
    temperature: Tensor  # float32 [M]

    @property
    def oldest(self) -> Tensor:
        """Return the version of the oldest token in each learned token's line, int64 [M]."""
        return torch.tensor([t.oldest_version for t in self.trajectories])[self.tokens.owner]

    def lines_of(self, samples: Tensor, lines: Tensor) -> Tensor:
        """Return the members of `lines` that belong to `samples`, in their order; int64 indices."""
        own: dict[int, list[int]] = {}
        for line, sample in zip(lines.tolist(), self.sample[lines].tolist(), strict=True):
            own.setdefault(sample, []).append(line)
        indices = [line for sample in samples.tolist() for line in own[sample]]
        return torch.tensor(indices, dtype=torch.int64)

    def leading(self, version: int) -> Tensor:
        """Mark learned tokens that `version` sampled from the start of their response on, bool [M].

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


def make_batch(
    samples: list[Trajectory],
    vocab_size: int,
    most_tokens: int = MOST_TOKENS,
    routers: RouterKind | None = None,
    *,
    centered: bool = False,
) -> TrainBatch:
    """Make the tensors of `samples`, or raise BatchError for the first that is not sound.

    `routers` are the model's, if their choices are to be replayed; `centered` samples have the
    sampler's likeliest tokens.
    """
    routing = routers and True
    facts = RunFacts(vocab_size, most_tokens, routing=routing, routers=routers, centered=centered)
    if not samples:
        raise BatchError("the batch has no trajectories")
    for sample in samples:
        if fault := find_fault(sample, facts):
            raise BatchError(f"sample {sample.sample_id} of {sample.generator or '?'}: {fault}")
    branches = torch.tensor([1 + len(t.branches) for t in samples])
    lines = [line for t in samples for line in t.lines]
    tokens = Tokens.of(lines, replay=routers is not None)
    behaviour = [np.frombuffer(line.logprobs, "<f4")[_mask(line)] for line in lines]
    number: dict[str, int] = {}
    return TrainBatch(
        samples=samples,
        trajectories=lines,
        sample=torch.arange(len(samples)).repeat_interleave(branches),
        weight=(1 / branches.double()).repeat_interleave(branches),
        tokens=tokens,
        rewards=torch.tensor([t.reward for t in samples], dtype=torch.float64),
        groups=torch.tensor([number.setdefault(t.group_id, len(number)) for t in samples]),
        behaviour=torch.from_numpy(np.concatenate(behaviour)),
        temperature=torch.tensor([t.sampling.temperature for t in lines])[tokens.owner],
    )


def _mask(line: Trajectory) -> NDArray[np.bool_]:
    return np.frombuffer(line.loss_mask, "u1").astype(bool)


STAGES = {"ref_logprobs": "ref_logp", "proximal_logprobs": "logp"}


def recorded_logprobs(
    batch: TrainBatch, field: Literal["ref_logprobs", "proximal_logprobs"]
) -> Tensor:
    """Return logprobs of a scoring stage, float32 [M]; BatchError names a sample without."""
    parts: list[np.ndarray] = []
    for line in batch.trajectories:
        data: bytes | None = getattr(line, field)
        if data is None:
            raise BatchError(
                f"sample {line.sample_id} has no {field}, which the objective needs: put "
                f"{STAGES[field]} into buffer.stages"
            )
        parts.append(np.frombuffer(data, "<f4")[_mask(line)])
    return torch.from_numpy(np.concatenate(parts))
