"""Advantages of tokens from the rewards of their samples, groups and batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.objectives.kl import ESTIMATORS
from umbra.services.trainer.objectives.values import gae

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Rewarded:
    """S samples with M learned tokens, and what they earned."""

    rewards: Tensor  # float64 [S]
    groups: Tensor  # int64 [S], the group of each sample, counted from 0
    owner: Tensor  # int64 [M], the sample of each token, ascending
    penalties: Tensor | None = None  # float [M], taken off the reward token by token
    values: Tensor | None = None  # float [M], of a value model


def token_advantages(of: Rewarded, pieces: ObjectiveSpec) -> tuple[Tensor, Tensor]:
    """A of each token, and the returns that a value model would learn, float32 and float64 [M]."""
    match pieces.advantage:
        case "reinforce_pp" | "gae":
            return _by_token(of, pieces)
        case "reinforce_pp_baseline":
            tokens = whitened(_centre(_totals(of), of.groups)[0][of.owner])
        case "dr_grpo":
            tokens = dr_grpo(_totals(of), of.groups)[of.owner]
        case "grpo":
            tokens = grpo(_totals(of), of.groups)[of.owner]
        case "rloo":
            tokens = rloo(_totals(of), of.groups)[of.owner]
    return tokens.float(), _totals(of)[of.owner]


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


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i - mean(R of the others in its group) = (R_i - mean) G / (G - 1).

    RLOO (arXiv 2402.14740); a group of one keeps its reward.

    Args and returns: as `dr_grpo`.
    """
    centred, count = _centre(rewards, groups)
    return (centred * (count / (count - 1).clamp(min=1))[groups]).float()


def whitened(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all of them, var unbiased; zeros where all are equal.

    The global normalisation of REINFORCE++ (arXiv 2501.03262), as verl's masked_whiten.
    """
    if not values.numel() or values.min() == values.max():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + VARIANCE_EPSILON).sqrt()


def _by_token(of: Rewarded, pieces: ObjectiveSpec) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns, whitened; with values: GAE, whitened."""
    rewards = torch.zeros(len(of.owner), dtype=torch.float64)
    if of.penalties is not None:
        rewards -= of.penalties
    last = torch.ones_like(of.owner, dtype=torch.bool)
    last[:-1] = of.owner[1:] != of.owner[:-1]
    rewards[last] += of.rewards[of.owner[last]]
    if pieces.advantage == "gae":
        assert of.values is not None
        advantages, returns = gae(rewards, of.values, of.owner, pieces.gamma, pieces.gae_lambda)
    else:
        _, returns = gae(rewards, torch.zeros_like(rewards), of.owner, pieces.gamma, 1.0)
        advantages = returns
    return whitened(advantages).float(), returns


def _totals(of: Rewarded) -> Tensor:
    """Rewards less all penalties of the sample, float64 [S]."""
    rewards = of.rewards.double()
    if of.penalties is None:
        return rewards
    return rewards.index_add(0, of.owner, -of.penalties.double())


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


def rewarded(
    batch: TrainBatch,
    pieces: ObjectiveSpec,
    limit: int,
    reference: Tensor | None,
    values: Tensor | None,
) -> Rewarded:
    """The rewards of `batch` with the penalties that `pieces` ask for.

    Args:
        batch: S samples with M learned tokens.
        pieces: overlong and KL settings are read.
        limit: tokens of the longest response.
        reference: log of the reference policy [M], needed for a KL to it in the reward.
        values: of a value model [M].
    """
    rewards, owner = batch.rewards, batch.sample[batch.tokens.owner]
    if pieces.overlong_buffer:
        own = torch.bincount(owner, minlength=len(rewards))
        rewards = rewards + overlong(own, limit, pieces.overlong_buffer)
    penalties = None
    if pieces.kl_coef and pieces.kl_in == "reward":
        assert reference is not None
        # Of the policy that sampled: its logprobs are exact and always there.
        estimate = ESTIMATORS[pieces.kl_estimator](batch.behaviour, reference)
        penalties = pieces.kl_coef * estimate.double()
    return Rewarded(rewards, batch.groups, owner, penalties, values)


def overlong(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """min(-(len - (limit - buffer)) / buffer, 0) of each sample, float64 [S].

    DAPO's soft overlong punishment (arXiv 2503.14476), in verl's form: nothing until `buffer`
    tokens before `limit`, then linearly down to -1 at `limit`.
    """
    exceeding = lengths.double() - (limit - buffer)
    return (-exceeding / buffer).clamp(max=0.0)
