"""Advantages of samples from the rewards of their groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i - mean(R of its group), without division by the standard deviation.

    Dr. GRPO (arXiv 2503.20783). A group of one has nothing to compare with: its advantage is the
    reward itself, as in verl. Where all rewards of a group are equal it is exactly zero.

    Args:
        rewards: float [S].
        groups: int64 [S], the group of each sample, counted from 0.

    Returns:
        float32 [S].
    """
    centred, _ = _centre(rewards, groups)
    return centred.float()


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6) over its group, with the unbiased (n - 1) deviation.

    GRPO (DeepSeekMath, arXiv 2402.03300); a group of one has mean 0 and deviation 1, as in verl.

    Args and returns: as `dr_grpo`.
    """
    centred, count = _centre(rewards, groups)
    squares = torch.zeros_like(count).index_add(0, groups, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    std[count == 1] = 1.0
    return (centred / (std[groups] + STD_EPSILON)).float()


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards less their group's mean [S], and the size of each group; both float64."""
    rewards = rewards.double()
    empty = torch.zeros(int(groups.max()) + 1, dtype=torch.float64)
    count = empty.index_add(0, groups, torch.ones_like(rewards))
    mean = empty.index_add(0, groups, rewards) / count
    mean[count == 1] = 0.0
    low = empty.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    high = empty.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    # Rounding must not turn "no difference" into a small one: such samples are skipped.
    level = (low == high) & (count > 1)
    return torch.where(level[groups], 0.0, rewards - mean[groups]), count


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"dr_grpo": dr_grpo, "grpo": grpo}
