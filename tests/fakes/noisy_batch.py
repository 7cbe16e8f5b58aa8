"""Trajectories of a model whose recorded logprobs are off by noise, so that ratios are spread out."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from umbra.proto.records import Sampling, Trajectory, VersionSpan, pack_float32, pack_int32

TEMPERATURE = 0.7


@torch.no_grad()
def noisy_trajectories(
    model: Any, *, groups: int = 3, size: int = 4, spread: float = 0.3, version: int = 2
) -> list[Trajectory]:
    """Groups of random responses of 2 to 7 tokens, every third cut off at the limit.

    Behaviour, proximal and reference logprobs are the model's plus noise of deviation `spread`
    each. The last token of each is of `version`, the others of the one before.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def noisy(logprobs: Tensor) -> bytes:
        noise = spread * torch.randn(len(logprobs), generator=generator)
        return pack_float32((logprobs + noise).tolist())

    made: list[Trajectory] = []
    for group in range(groups):
        prompt = draw(5, 30, 2 + group)
        for member in range(size):
            response = draw(5, 30, draw(2, 8, 1)[0])
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            distribution = (logits.float() / TEMPERATURE).log_softmax(-1)
            logprobs = distribution.gather(1, torch.tensor(response)[:, None])[:, 0]
            last = len(response) - 1
            made.append(
                Trajectory(
                    sample_id=f"s{group}-{member}",
                    group_id=f"g{group}",
                    prompt_id=f"p{group}",
                    attempt=1,
                    prompt_ids=pack_int32(prompt),
                    response_ids=pack_int32(response),
                    loss_mask=bytes([1] * len(response)),
                    logprobs=noisy(logprobs),
                    ref_logprobs=noisy(logprobs),
                    proximal_logprobs=noisy(logprobs),
                    spans=[
                        VersionSpan(version=version - 1, start=0, end=last),
                        VersionSpan(version=version, start=last, end=last + 1),
                    ],
                    finish_reason="length" if len(made) % 3 == 0 else "stop",
                    reward=float(draw(0, 3, 1)[0] + member),  # never all equal
                    sampling=Sampling(temperature=TEMPERATURE),
                )
            )
    return made


def changed(trajectories: list[Trajectory], **fields: Any) -> list[Trajectory]:
    """The same trajectories with `fields` replaced in all of them."""
    return [msgspec.structs.replace(one, **fields) for one in trajectories]
