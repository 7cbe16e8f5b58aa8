"""Advantages, rewards and value targets against values worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from umbra.services.config import TrainerConfig
from umbra.services.trainer.objectives.advantages import (
    batch_advantages,
    dr_grpo,
    gae,
    grpo,
    overlong,
    rloo,
    token_advantages,
    value_loss,
    whitened,
)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
GROUPS = torch.tensor([0, 1, 0, 0, 1])


# Unbiased deviations of the two groups.
FIRST = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2) + 1e-6
SECOND = math.sqrt(2 * 2.5**2) + 1e-6


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (dr_grpo, [1 - 2 / 3, -2.5, -2 / 3, 1 - 2 / 3, 2.5]),
        (grpo, [1 / 3 / FIRST, -2.5 / SECOND, -2 / 3 / FIRST, 1 / 3 / FIRST, 2.5 / SECOND]),
        (rloo, [1 - 0.5, 0 - 5.0, 0 - 1.0, 1 - 0.5, 5.0 - 0]),
    ],
)
def test_advantages_within_a_group(advantage: Any, expected: list[float]) -> None:
    torch.testing.assert_close(advantage(REWARDS, GROUPS), torch.tensor(expected))


@pytest.mark.parametrize("advantage", [dr_grpo, grpo, rloo])
def test_a_group_of_one_keeps_its_reward_and_equal_rewards_give_exactly_zero(
    advantage: Any,
) -> None:
    rewards = torch.tensor([0.7, *[0.1] * 7], dtype=torch.float64)
    groups = torch.tensor([0, *[1] * 7])
    result = advantage(rewards, groups)
    assert result[0] == pytest.approx(0.7, rel=1e-5)
    assert torch.count_nonzero(result[1:]) == 0
    assert result.dtype == torch.float32


def by_token(**keys: Any) -> tuple[Tensor, Tensor]:
    """Of two groups of two samples with 1, 2, 1 and 3 tokens; the second one has no penalties."""
    return token_advantages(
        torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0, 1, 1, 2, 3, 3, 3]),
        TrainerConfig(**keys).pieces,
        penalties=torch.tensor([0.5, 0, 0, 0.25, 0.1, 0.2, 0.3]),
        values=torch.tensor([0.5, 0.25, 0.0, 1.0, -1.0, 0.5, 0.5]),
    )


def test_a_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    batch: Any = SimpleNamespace(
        rewards=torch.tensor([1.0], dtype=torch.float64),
        groups=torch.tensor([0]),
        sample=torch.tensor([0]),
        tokens=SimpleNamespace(owner=torch.tensor([0, 0])),
        behaviour=torch.tensor([-1.0, -2.0]),
    )
    keys: dict[str, Any] = {"objective": "reinforce_pp", "kl_coef": 0.5, "kl_estimator": "k1"}
    pieces = TrainerConfig(**keys).pieces
    _, returns = batch_advantages(batch, pieces, torch.tensor([-1.5, -1.0]), None)
    torch.testing.assert_close(returns, torch.tensor([1.25, 1.5], dtype=torch.float64))


def test_group_advantages_are_of_the_reward_less_all_penalties() -> None:
    advantages, _ = by_token(advantage="dr_grpo")
    first, second = (0.5 - 0.0) / 2, (1.75 - 0.4) / 2
    expected = [first, -first, -first, second, -second, -second, -second]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def whiten(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_reinforce_pp_whitens_discounted_returns_over_all_tokens() -> None:
    g = 0.5
    third = [-0.1 + g * (-0.2 + g * 0.7), -0.2 + g * 0.7, 0.7]
    returns = [0.5, 0.0, 0.0, 1.75, *third]
    advantages, got = by_token(objective="reinforce_pp", gamma=g)
    torch.testing.assert_close(got, torch.tensor(returns).double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(advantages, torch.tensor(whiten(returns)), rtol=1e-5, atol=1e-6)


def test_reinforce_pp_baseline_whitens_what_is_left_of_the_group_mean() -> None:
    first, second = (0.5 - 0.0) / 2, (1.75 - 0.4) / 2
    centred = [first, -first, -first, second, -second, -second, -second]
    advantages, _ = by_token(objective="reinforce_pp_baseline")
    torch.testing.assert_close(advantages, torch.tensor(whiten(centred)), rtol=1e-5, atol=1e-6)


def test_whitening_makes_no_difference_out_of_rounding() -> None:
    assert torch.count_nonzero(whitened(torch.full((7,), 0.1).double())) == 0
    assert whitened(torch.zeros(0)).numel() == 0


def test_gae() -> None:
    gamma, lam = 0.9, 0.8
    rewards, values = [0.0, 1.0, 2.0, -1.0], [0.5, 0.25, 1.0, 2.0]
    # Sequences of tokens 0, 1, 2 and of token 3.
    d2 = 2.0 - 1.0
    d1 = 1.0 + gamma * 1.0 - 0.25
    d0 = 0.0 + gamma * 0.25 - 0.5
    a2, a1 = d2, d1 + gamma * lam * d2
    a0 = d0 + gamma * lam * a1
    expected = [a0, a1, a2, -1.0 - 2.0]
    owner = torch.tensor([0, 0, 0, 2])  # sequence 1 has no tokens
    advantages, returns = gae(torch.tensor(rewards), torch.tensor(values), owner, gamma, lam)
    torch.testing.assert_close(advantages, torch.tensor(expected).double())
    totals = [a + v for a, v in zip(expected, values, strict=True)]
    torch.testing.assert_close(returns, torch.tensor(totals).double())


def test_gae_in_an_objective_is_whitened_and_gives_the_returns_to_learn() -> None:
    rewards = torch.tensor([0.5, 0, 0, 1.75, -0.1, -0.2, 0.7])
    values = torch.tensor([0.5, 0.25, 0.0, 1.0, -1.0, 0.5, 0.5])
    owner = torch.tensor([0, 1, 1, 2, 3, 3, 3])
    plain, returns = gae(rewards, values, owner, 1.0, 0.95)
    advantages, got = by_token(objective="ppo_critic")
    torch.testing.assert_close(got, returns)
    expected = torch.tensor(whiten(plain.tolist()))
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)


def test_value_loss_takes_the_worse_of_plain_and_clipped() -> None:
    values = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 0.0]).double(), torch.tensor([1.5, 1.5, 1.5]).double()
    losses = value_loss(values, returns, old, clip=0.2)
    # The first two are clipped to 0.2, which is further from 1.5; the third is within the clip.
    torch.testing.assert_close(losses, torch.tensor([1.3**2, 1.3**2, 1.4**2]).double() / 2)
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.0, -1.4]).double())
    plain = value_loss(values, returns, old, clip=0.0)
    torch.testing.assert_close(plain, torch.tensor([0.5**2, 0.5**2, 1.4**2]).double() / 2)
    # The clip is around the old value: 0.5 is 0.5 below 1, so it counts as 0.8.
    moved = value_loss(torch.tensor([0.5]), torch.zeros(1), torch.ones(1), clip=0.2)
    torch.testing.assert_close(moved, torch.tensor([0.8**2]) / 2)


def test_overlong_costs_linearly_within_the_buffer() -> None:
    """Each sample before its own limit."""
    lengths = torch.tensor([10, 80, 85, 90, 100, 45])
    limits = torch.tensor([100, 100, 100, 100, 100, 50])
    expected = [0.0, 0.0, -0.25, -0.5, -1.0, -0.75]
    got = overlong(lengths, limits, buffer=20)
    torch.testing.assert_close(got, torch.tensor(expected).double())
