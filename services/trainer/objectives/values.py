"""Advantages by a value model, and the loss that the value model learns by."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from umbra.services.trainer.batch import TrainBatch


class ValueLoss(Protocol):
    """A value model as the policy's update sees it."""

    def values(self, batch: TrainBatch) -> Tensor:
        """V before each learned token, float [M], no gradient."""
        ...

    def learn(self, batch: TrainBatch, values: Tensor, returns: Tensor) -> dict[str, float | None]:
        """Update towards `returns` [M]; `values` [M] are those the advantages came from."""
        ...


def gae(
    rewards: Tensor, values: Tensor, owner: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the returns that a value model learns, float64 [M] each.

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    GAE, arXiv 1506.02438, eq. 16; V and A are 0 after a sequence's last token, returns are A + V.
    Only learned tokens are steps: those of the environment between them are skipped. With values of
    0 and lam = 1 the returns are plain discounted sums of rewards.

    Args:
        rewards: float [M], of each token.
        values: float [M].
        owner: int64 [M], the sequence of each token, ascending.
        gamma: discount per token.
        lam: lambda.
    """
    lengths = torch.bincount(owner)
    rows, width = len(lengths), int(lengths.max()) if len(lengths) else 0
    column = torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]
    reward, value = torch.zeros(2, rows, width + 1, dtype=torch.float64)
    reward[owner, column] = rewards.double()
    value[owner, column] = values.double()
    advantage = torch.zeros_like(value)
    for t in range(width - 1, -1, -1):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        advantage[:, t] = delta + gamma * lam * advantage[:, t + 1]
    return advantage[owner, column], (advantage + value)[owner, column]


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token, [N].

    PPO's clipped value loss (Schulman et al., "baselines", ppo2); a clip of 0 is none.
    """
    error = (values - returns).square()
    if clip:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2
