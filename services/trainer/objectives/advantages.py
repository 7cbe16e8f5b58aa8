"""Advantages of tokens from the rewards of their samples, groups and batch."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.objectives.terms import ESTIMATORS

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


def batch_advantages(
    batch: TrainBatch, pieces: ObjectiveSpec, reference: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `token_advantages` of `batch`, with the penalties that `pieces` ask for.

    `reference` is the log of the reference policy [M], needed for a KL to it in the reward. That KL
    is of the policy that sampled: its logprobs are exact and always there.
    """
    rewards, owner = batch.rewards, batch.sample[batch.tokens.owner]
    if buffer := pieces.overlong_buffer:
        # DAPO's soft overlong punishment (arXiv 2503.14476), in verl's form: nothing until `buffer`
        # tokens before the limit of a turn, then linearly down to -1 at the limit.
        turns = [max(map(len, sample.loss_mask.split(b"\0"))) for sample in batch.samples]
        limits = [sample.sampling.max_tokens for sample in batch.samples]
        exceeding = (torch.tensor(turns) - torch.tensor(limits) + buffer).clamp(min=0)
        rewards = rewards - exceeding.double() / buffer
    penalties = torch.zeros(len(owner))
    if pieces.kl_coef and pieces.kl_in == "reward":
        assert reference is not None
        estimate = ESTIMATORS[pieces.kl_estimator](batch.behaviour, reference)
        penalties = pieces.kl_coef * estimate.double()
    return token_advantages(rewards, batch.groups, owner, pieces, penalties, values)


def token_advantages(
    rewards: Tensor,
    groups: Tensor,
    owner: Tensor,
    pieces: ObjectiveSpec,
    penalties: Tensor,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return A of each token, float32 [M], and the returns a value model would learn, float64 [M].

    REINFORCE++ takes discounted returns, GAE advantages by the values; both are whitened. On-policy
    distillation takes kl_coef (log p_teacher - log mu) of each token alone and no reward: with r A
    as gain its expected gradient on-policy is the reverse KL's to the teacher at each prefix
    (Lu et al., "On-Policy Distillation", Thinking Machines 2025; prime-rl's ref_kl loss).

    Args:
        rewards: float64 [S].
        groups: int64 [S], the group of each sample, counted from 0.
        owner: int64 [M], the sample of each token, ascending.
        penalties: float [M], taken off the reward token by token.
        values: float [M], of a value model.
    """
    if pieces.advantage in ("reinforce_pp", "gae"):
        earned = -penalties.double()
        last = torch.ones_like(owner, dtype=torch.bool)
        last[:-1] = owner[1:] != owner[:-1]
        earned[last] += rewards[owner[last]]
        lam = pieces.gae_lambda
        if pieces.advantage == "reinforce_pp":
            values, lam = torch.zeros_like(earned), 1.0
        assert values is not None
        advantages, returns = gae(earned, values, owner, pieces.gamma, lam)
        return whitened(advantages).float(), returns
    totals = rewards.double().index_add(0, owner, -penalties.double())
    match pieces.advantage:
        case "teacher":
            tokens = -penalties
        case "reinforce_pp_baseline":
            tokens = whitened(_centre(totals, groups)[0][owner])
        case "dr_grpo":
            tokens = dr_grpo(totals, groups)[owner]
        case "grpo":
            tokens = grpo(totals, groups)[owner]
        case "rloo":
            tokens = rloo(totals, groups)[owner]
    return tokens.float(), totals[owner]


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = R_i - mean(R of its group), not divided by the standard deviation; float32 [S].

    Dr. GRPO (arXiv 2503.20783). A group of one has nothing to compare with: its advantage is the
    reward itself, as in verl. Where all rewards of a group are equal it is exactly zero.
    """
    centred, _ = _centre(rewards, groups)
    return centred.float()


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = (R_i - mean) / (std + 1e-6) over its group, with the unbiased (n - 1) deviation.

    GRPO (DeepSeekMath, arXiv 2402.03300); a group of one has mean 0 and deviation 1, as in verl.
    """
    centred, count = _centre(rewards, groups)
    squares = torch.zeros_like(count).index_add(0, groups, centred.square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    std[count == 1] = 1.0
    return (centred / (std[groups] + STD_EPSILON)).float()


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return A_i = R_i - mean(R of the others in its group) = (R_i - mean) G / (G - 1).

    RLOO (arXiv 2402.14740); a group of one keeps its reward.
    """
    centred, count = _centre(rewards, groups)
    return (centred * (count / (count - 1).clamp(min=1))[groups]).float()


def whitened(values: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over all, var unbiased; zeros where all are equal.

    The global normalisation of REINFORCE++ (arXiv 2501.03262), as verl's masked_whiten.
    """
    if not values.numel() or values.min() == values.max():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var() + VARIANCE_EPSILON).sqrt()


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards less their group's mean [S], and the size of each group; both float64."""
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


def gae(
    rewards: Tensor, values: Tensor, owner: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages, and the returns a value model learns, float64 [M] each.

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    GAE, arXiv 1506.02438, eq. 16; V and A are 0 after a sequence's last token, returns are A + V.
    Only learned tokens are steps: the environment's between them are skipped. With values of
    0 and lam = 1 the returns are plain discounted sums of rewards. `owner` is the sequence of each
    token, ascending.
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
    """Return max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token, [N].

    PPO's clipped value loss (Schulman et al., "baselines", ppo2); a clip of 0 is none.
    """
    error = (values - returns).square()
    if clip:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return error / 2
