"""Trajectories whose recorded logprobs are off by noise, and a learner that keeps gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fakes.rank_bench import configured
from fakes.trajectories import trajectory
from torch import Tensor

from umbra.proto.records import (
    Sampling,
    Support,
    Trajectory,
    VersionSpan,
    pack_float32,
    pack_int32,
)
from umbra.services.config import RunConfig
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import REASONS, Learner
from umbra.services.trainer.make_model import END, SPECIAL_TOKENS
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

TEMPERATURE = 0.7
HEAD = 5  # tokens that are told of each
VERSION = 3
END_ID = SPECIAL_TOKENS.index(END)
Gradients = dict[str, Tensor]


def settings(directory: Path, *stages: str, **keys: Any) -> RunConfig:
    """A trainer of `directory` on the CPU, with these keys; responses have 8 tokens at most."""
    buffer = {"buffer.stages": [*stages], "sampling.max_tokens": 8}
    return configured(directory, **({"threads": 1, "device": "cpu"} | buffer | keys))


def update(
    directory: Path, trajectories: list[Trajectory], *stages: str, critic: Any = None, **keys: Any
) -> tuple[Gradients, Row]:
    """The gradients of an update of version `VERSION`, and its row."""
    config = settings(directory, *stages, **keys)
    learner = Recorder(load_policy(directory)[0], config.trainer, steps=1)
    batch = make_batch(trajectories, learner.model.config.vocab_size)
    row = PolicyUpdate(config, learner, critic)(batch, VERSION, lambda: True)
    assert row is not None
    return learner.gradients, row


class Recorder(Learner):
    """A learner that keeps the gradients instead of using them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients: dict[str, Tensor] = {}

    def update(self, step: int, fault: str = "") -> Row:
        del step, fault
        named = self.model.named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.model.zero_grad()
        columns = ("grad_norm", "lr", "skipped", *(f"skipped/{reason}" for reason in REASONS))
        return dict.fromkeys(columns, 0.0)


@torch.no_grad()
def noisy_trajectories(
    model: Any, *, groups: int = 3, size: int = 4, spread: float = 0.3, version: int = 2
) -> list[Trajectory]:
    """Groups of random responses of 2 to 7 tokens; every third is cut off, without an end token.

    Behaviour, proximal and reference logprobs are the model's plus noise of deviation `spread`
    each; of the likeliest tokens the sampler's are less by `spread`. The last token of each is of
    `version`, the others of the one before.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def noisy(logprobs: Tensor) -> list[float]:
        return (logprobs + spread * torch.randn(len(logprobs), generator=generator)).tolist()

    made: list[Trajectory] = []
    for group in range(groups):
        prompt = draw(5, 30, 2 + group)
        for member in range(size):
            response = draw(5, 30, draw(2, 8, 1)[0])
            cut = len(made) % 3 == 0
            if not cut:
                response[-1] = END_ID
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            distribution = (logits.float() / TEMPERATURE).log_softmax(-1)
            logprobs = distribution.gather(1, torch.tensor(response)[:, None])[:, 0]
            likeliest = distribution.topk(HEAD)
            last = len(response) - 1
            made.append(
                trajectory(
                    prompt,
                    response,
                    noisy(logprobs),
                    ref_logprobs=pack_float32(noisy(logprobs)),
                    proximal_logprobs=pack_float32(noisy(logprobs)),
                    sample_id=f"s{group}-{member}",
                    group_id=f"g{group}",
                    prompt_id=f"p{group}",
                    spans=[
                        VersionSpan(version=version - 1, start=0, end=last),
                        VersionSpan(version=version, start=last, end=last + 1),
                    ],
                    finish_reason="length" if cut else "stop",
                    reward=draw(0, 100, 1)[0] / 7,  # none is its group's mean
                    sampling=Sampling(temperature=TEMPERATURE),
                    support=Support(
                        sizes=HEAD.to_bytes(2, "little") * len(response),
                        ids=pack_int32(likeliest.indices.flatten().tolist()),
                        logprobs=pack_float32(likeliest.values.flatten().sub(spread).tolist()),
                    ),
                )
            )
    return made
