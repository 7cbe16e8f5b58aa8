"""Real rollouts of a small policy, and the configuration of a trainer that learns from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from fakes.rank_bench import configured
from fakes.trajectories import trajectory
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.records import Sampling, Trajectory
from umbra.services.config import RunConfig

GROUPS, GROUP_SIZE, LENGTH, TEMPERATURE = 3, 4, 6, 0.7
LIKED = 30  # rewards count tokens below this id


def config(directory: Path, **trainer: Any) -> RunConfig:
    """Settings of the section `trainer` on top of the tests' own."""
    keys = {"learning_rate": 3e-3, "warmup_steps": 0, "threads": 1, "device": "cpu"}
    return configured(directory, **(keys | {"run.steps": 2} | trainer))


@torch.no_grad()
def rollouts(
    model: PreTrainedModel, version: int, *, level: bool = False, seed: int = 0
) -> list[Trajectory]:
    """Groups sampled token by token; `level` gives all the same reward."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Trajectory] = []
    for group in range(GROUPS):
        prompt = [5 + group] * (2 + group)
        ids = torch.tensor([prompt] * GROUP_SIZE)
        steps: list[Tensor] = []
        for _ in range(LENGTH):
            distribution = (model(ids).logits[:, -1] / TEMPERATURE).log_softmax(-1)
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
            steps.append(distribution.gather(1, token))
            ids = torch.cat([ids, token], 1)
        logprobs = torch.cat(steps, 1).tolist()
        for member in range(GROUP_SIZE):
            length = LENGTH - member  # of different lengths, as real ones are
            response = ids[member, len(prompt) : len(prompt) + length].tolist()
            made.append(
                trajectory(
                    prompt,
                    response,
                    logprobs[member][:length],
                    version=version,
                    sample_id=f"s{version}-{group}-{member}",
                    group_id=f"g{version}-{group}",
                    prompt_id=f"p{group}",
                    finish_reason="length",
                    started_at=time.time(),
                    reward=1.0 if level else sum(token < LIKED for token in response) / length,
                    sampling=Sampling(temperature=TEMPERATURE),
                )
            )
    return made
