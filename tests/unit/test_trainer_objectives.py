"""Advantages, objectives and aggregations against values worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from umbra.services.modeling.packing import Tokens
from umbra.services.runtime.config import Trainer
from umbra.services.trainer.advantages import dr_grpo, grpo
from umbra.services.trainer.learner import learning_rate
from umbra.services.trainer.objectives import make_objective, token_weights


def test_dr_grpo_is_reward_minus_group_mean() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    groups = torch.tensor([0, 1, 0, 0, 1])
    expected = [1 - 2 / 3, -2.5, -2 / 3, 1 - 2 / 3, 2.5]
    torch.testing.assert_close(dr_grpo(rewards, groups), torch.tensor(expected))


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    groups = torch.tensor([0, 1, 0, 0, 1])
    first = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)
    second = math.sqrt(2 * 2.5**2)
    expected = [
        (1 / 3) / (first + 1e-6),
        -2.5 / (second + 1e-6),
        (-2 / 3) / (first + 1e-6),
        (1 / 3) / (first + 1e-6),
        2.5 / (second + 1e-6),
    ]
    torch.testing.assert_close(grpo(rewards, groups), torch.tensor(expected))


@pytest.mark.parametrize("advantage", [dr_grpo, grpo])
def test_a_group_of_one_keeps_its_reward_and_equal_rewards_give_exactly_zero(advantage) -> None:  # noqa: ANN001
    rewards = torch.tensor([0.7, *[0.1] * 7], dtype=torch.float64)
    groups = torch.tensor([0, *[1] * 7])
    result = advantage(rewards, groups)
    assert result[0] == pytest.approx(0.7, rel=1e-5)
    assert torch.count_nonzero(result[1:]) == 0
    assert result.dtype == torch.float32


# Probabilities of four tokens under pi, p (proximal) and mu (behaviour), and their advantages.
PI = torch.tensor([0.6, 0.6, 0.2, 0.5])
P = torch.tensor([0.4, 0.4, 0.4, 0.5])
MU = torch.tensor([0.5, 0.5, 0.4, 0.1])
A = torch.tensor([2.0, -2.0, -1.0, 1.0])


def loss_and_gradient(name: str) -> tuple[Tensor, Tensor, list[bool]]:
    """Losses, their gradients by log pi, and clip flags; clips at 0.8 and 1.3, cap 2."""
    config = Trainer(objective=name, clip_low=0.2, clip_high=0.3, is_cap=2.0)  # pyright: ignore[reportArgumentType]
    logprobs = PI.log().requires_grad_()
    losses, clipped = make_objective(config)(logprobs, MU.log(), P.log(), A)
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.detach(), logprobs.grad, clipped.tolist()


# pi/mu = 1.2, 1.2, 0.5, 5 and pi/p = 1.5, 1.5, 0.5, 1 and p/mu = 0.8, 0.8, 1, 5.
# A clipped token has no gradient; elsewhere d loss / d log pi = -w r A, which is the loss itself.
@pytest.mark.parametrize(
    ("name", "losses", "clipped"),
    [
        ("ppo", [-2.4, 2.4, 0.8, -1.3], [False, False, True, True]),
        ("naive", [-2.6, 3.0, 0.8, -1.0], [True, False, True, False]),
        ("tis", [-2.6 * 0.8, 3.0 * 0.8, 0.8, -2.0], [True, False, True, False]),
        ("decoupled", [-2.6 * 0.8, 3.0 * 0.8, 0.8, 0.0], [True, False, True, False]),
    ],
)
def test_objectives(name: str, losses: list[float], clipped: list[bool]) -> None:
    got, gradient, flags = loss_and_gradient(name)
    torch.testing.assert_close(got, torch.tensor(losses))
    assert flags == clipped
    expected = [0.0 if flag else loss for loss, flag in zip(losses, clipped, strict=True)]
    torch.testing.assert_close(gradient, torch.tensor(expected))


def test_objectives_agree_where_nothing_is_stale() -> None:
    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -3.0])
    for name in ("ppo", "tis", "decoupled", "naive"):
        objective = make_objective(Trainer(objective=name))  # pyright: ignore[reportArgumentType]
        losses, clipped = objective(logprobs, logprobs, logprobs, advantages)
        torch.testing.assert_close(losses, -advantages)
        assert not clipped.any()


def test_a_hopeless_ratio_stays_finite() -> None:
    objective = make_objective(Trainer(objective="ppo"))
    far = torch.tensor([-1e4]).requires_grad_()
    losses, _ = objective(torch.tensor([0.0]), far, far, torch.tensor([-1.0]))
    assert torch.isfinite(losses).all()


def three_sequences() -> Tokens:
    """Sequences with 1, 3 and 2 learned tokens."""
    return Tokens(
        ids=torch.arange(12),
        lengths=torch.tensor([3, 5, 4]),
        learned=torch.tensor([2, 5, 6, 7, 10, 11]),
        owner=torch.tensor([0, 1, 1, 1, 2, 2]),
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5]),
        ("sequence_mean", [0, 1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]),
        ("constant", [0, 1 / 30, 1 / 30, 1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_aggregations_leave_out_what_is_not_trained(
    aggregation: str, expected: list[float]
) -> None:
    trained = torch.tensor([1, 2])
    weights = token_weights(aggregation, three_sequences(), trained, samples=3, length=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    config = Trainer(learning_rate=1.0, schedule="linear", final_lr_ratio=0.2, warmup_steps=2)
    rates = [learning_rate(config, step, 7) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = Trainer(learning_rate=1.0, schedule="cosine", final_lr_ratio=0.0, warmup_steps=0)
    assert [learning_rate(cosine, s, 3) for s in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    constant = Trainer(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(constant, 50, 3) == 1.0
