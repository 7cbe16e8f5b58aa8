"""Advantages, value targets and objectives, token by token, against values worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fakes.trajectories import trajectory as made
from torch import Tensor

from umbra.proto.records import Sampling
from umbra.services.config import TrainerConfig
from umbra.services.config.presets import PRESETS
from umbra.services.trainer.learner import learning_rate
from umbra.services.trainer.objectives import terms
from umbra.services.trainer.objectives.advantages import (
    batch_advantages,
    dr_grpo,
    gae,
    grpo,
    rloo,
    token_advantages,
    value_loss,
    whitened,
)
from umbra.services.trainer.objectives.objective import (
    Objective,
    TokenInputs,
    TokenLosses,
    token_weights,
)
from umbra.services.trainer.objectives.terms import Sequences

# Probabilities of four tokens under pi, p (proximal) and mu (behaviour), and their advantages.
PI = [0.6, 0.6, 0.2, 0.5]
P = [0.4, 0.4, 0.4, 0.5]
MU = [0.5, 0.5, 0.4, 0.1]
REF = [0.3, 0.9, 0.2, 0.25]
A = [2.0, -2.0, -1.0, 1.0]
OWNER = [0, 0, 1, 1]
# pi/mu = 1.2, 1.2, 0.5, 5 and pi/p = 1.5, 1.5, 0.5, 1 and p/mu = 0.8, 0.8, 1, 5.


def compute(
    pi: list[float] = PI, entropy: list[float] | None = None, **keys: Any
) -> tuple[TokenLosses, Tensor]:
    """Losses and their gradients by log pi, in float64."""
    preset = PRESETS[keys.pop("objective", "tis_opsm")]
    objective = Objective(msgspec.structs.replace(preset, **keys))
    logprobs = torch.tensor(pi, dtype=torch.float64).log().requires_grad_()
    behaviour, proximal, reference = (
        torch.tensor(x, dtype=torch.float64).log() for x in (MU, P, REF)
    )
    sequences = Sequences(torch.tensor(OWNER), 2)
    tokens = TokenInputs(
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=proximal,
        advantages=torch.tensor(A).double(),
        sequences=sequences,
        entropy=torch.tensor(entropy or [0.0] * 4).double(),
        reference=reference,
    )
    result = objective(tokens)
    result.losses.sum().backward()
    assert logprobs.grad is not None
    return replace(result, losses=result.losses.detach()), logprobs.grad


GEOMETRIC = {"mask": "geometric", "mask_low": 0.9, "mask_high": 2.3}


# A clipped token has no gradient; elsewhere d loss / d log pi = -w r A, which is the loss itself.
@pytest.mark.parametrize(
    ("keys", "losses", "clipped"),
    [
        ({"objective": "ppo"}, [-2.4, 2.4, 0.8, -1.3], "0011"),
        ({"objective": "naive"}, [-2.6, 3.0, 0.8, -1.0], "1010"),
        ({"objective": "tis"}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, -2.0], "1010"),
        ({"objective": "tis", "is_floor": 0.9}, [-2.6 * 0.9, 3.0 * 0.9, 0.8, -2.0], "1010"),
        ({"objective": "tis", "is_cap": 0.0}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, -5.0], "1010"),
        ({"objective": "decoupled"}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, 0.0], "1010"),
        ({"objective": "icepop", "is_cap": 4.0}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, 0.0], "1010"),
        ({"objective": "icepop", "is_floor": 0.9}, [0.0, 0.0, 0.8, -5.0], "1010"),
        # Products of a sequence: 0.64 and 5.
        ({"objective": "tis", "is_level": "sequence"}, [-2.6 * 0.64, 3 * 0.64, 1.6, -2.0], "1010"),
        ({"objective": "naive", "mask": "token", "mask_low": 0.9}, [0.0, 0.0, 0.8, 0.0], "1010"),
        ({"objective": "naive", "mask": "sequence"}, [-2.6, 3.0, 0.0, 0.0], "1010"),
        # Geometric means of a sequence: 0.8 and sqrt(5) = 2.24.
        ({**GEOMETRIC, "objective": "tis", "is_cap": 0.0}, [0.0, 0.0, 0.8, -5.0], "1010"),
        # Mean log mu/pi of the sequences: -0.182 and (0.693 - 1.609) / 2 = -0.458.
        ({"objective": "ppo", "mask": "opsm"}, [-2.4, 2.4, 0.8, -1.3], "0011"),
        ({"objective": "tis_opsm"}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, -2.0], "1010"),
        # At most c |A| where the advantage is negative, and only there.
        ({"objective": "ppo", "dual_clip": 1.25, "clip_high": 0.2}, [-2.4, 2.4, 0.8, -1.2], "0011"),
        ({"objective": "ppo", "dual_clip": 1.1}, [-2.4, 2.2, 0.8, -1.3], "0111"),
    ],
    ids=str,
)
def test_objectives(keys: dict[str, Any], losses: list[float], clipped: str) -> None:
    chosen: dict[str, Any] = {"clip_high": 0.3} | keys
    result, gradient = compute(PI, None, **chosen)
    torch.testing.assert_close(result.losses, torch.tensor(losses).double(), rtol=1e-6, atol=1e-7)
    assert "".join(str(int(flag)) for flag in result.clipped) == clipped
    assert result.kept.tolist() == [loss != 0 for loss in losses]
    flat = [c == "1" for c in clipped]
    expected = [0.0 if f else loss for f, loss in zip(flat, losses, strict=True)]
    torch.testing.assert_close(gradient, torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def test_weights_at_their_bounds_are_kept_and_clipped_ones_are_told() -> None:
    assert terms.masked(torch.tensor([0.4, 0.5, 2.0, 3.0]), 0.5, 2.0).tolist() == [0, 0.5, 2.0, 0]
    assert terms.masked(torch.tensor([9.0]), 0.5, 0.0).tolist() == [9.0]
    zero = torch.zeros(1)  # 1 - 0, A > 0
    assert terms.probability(zero, zero - 1e9, zero + 1, 1.0).all()
    assert compute(objective="cispo", clip_high=0.3)[0].clipped.tolist() == [False] * 3 + [True]
    # A second clip leaves gains of small advantages alone.
    ratio, advantages = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([0.5, 0.0, -0.5])
    gain, flat = terms.ppo(ratio, advantages, 0.2, 0.2, 3.0)
    assert (gain.tolist(), flat.tolist()) == ([0.5, 0.0, -1.5], [False, False, True])


def test_entropies_are_taken_off_the_losses() -> None:
    entropy = [0.1, 0.2, 0.3, 0.4]
    plain, found = (compute(PI, entropy, objective="ppo", entropy_coef=c)[0] for c in (0.0, 0.5))
    torch.testing.assert_close(found.losses, plain.losses - 0.5 * torch.tensor(entropy).double())


def test_a_hopeless_ratio_stays_finite() -> None:
    objective = Objective(TrainerConfig(objective="tis").pieces)
    far = torch.tensor([-1e4]).requires_grad_()
    sequences = Sequences(torch.zeros(1, dtype=torch.int64), 1)
    one = torch.tensor([-1.0])
    result = objective(TokenInputs(far, far.detach(), torch.zeros(1), one, sequences, one))
    result.losses.sum().backward()
    assert torch.isfinite(result.losses).all()
    assert far.grad is not None
    assert torch.isfinite(far.grad).all()


@pytest.mark.parametrize(
    ("aggregation", "trained", "everything"),
    [
        ("token_mean", [1 / 5] * 5, [1 / 6] * 5),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4], [1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("sequence_sum", [1 / 2] * 5, [1 / 3] * 5),
        ("constant", [1 / 30] * 5, [1 / 30] * 5),
    ],
)
def test_aggregations_leave_out_what_is_not_trained(
    aggregation: str, trained: list[float], everything: list[float]
) -> None:
    """Three sequences with 1, 3 and 2 learned tokens, the first of which is not trained."""
    part, own = torch.tensor([1, 2]), torch.tensor([1, 3, 2])
    lines, samples = (torch.arange(3).repeat_interleave(own), own, part), torch.ones(3).double()
    for denominator, expected in (("trained", trained), ("all", everything)):
        pieces: Any = SimpleNamespace(aggregation=aggregation, denominator=denominator)
        weights, halves = (token_weights(pieces, *lines, cuts, 10, samples) for cuts in (1, 2))
        torch.testing.assert_close(weights, torch.tensor([0.0, *expected]))
        share = aggregation == "constant" or denominator == "all"  # of the batch, by updates
        torch.testing.assert_close(halves, (2 if share else 1) * weights)


def test_learning_rate_rises_then_falls_to_nothing_after_the_last_step() -> None:
    config = TrainerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2)
    rates = [learning_rate(config, step, 7) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    cosine = TrainerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=0)
    assert [learning_rate(cosine, s, 4) for s in range(5)] == pytest.approx(
        [1.0, 0.8535533, 0.5, 0.1464466, 0.0]
    )
    constant = TrainerConfig(learning_rate=1.0, warmup_steps=0)
    assert learning_rate(constant, 50, 3) == 1.0


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
def test_a_group_of_one_keeps_its_reward_and_equal_ones_give_exactly_zero(advantage: Any) -> None:
    rewards = torch.tensor([0.7, *[0.1] * 7, *[-0.1] * 7], dtype=torch.float64)
    groups = torch.tensor([0, *[1] * 7, *[2] * 7])
    result = advantage(rewards, groups)
    assert result[0] == pytest.approx(0.7, rel=1e-5)
    assert torch.count_nonzero(result[1:]) == 0
    assert result.dtype == torch.float32


def test_epsilons_are_added_to_deviations_and_variances() -> None:
    pair = torch.tensor([0.0, 1e-5], dtype=torch.float64)
    scaled = grpo(pair, torch.tensor([0, 0]))[1].item()
    assert scaled == pytest.approx(5e-6 / (1e-5 / math.sqrt(2) + 1e-6))
    found = whitened(10 * pair)[1].item()
    assert found == pytest.approx(5e-5 / math.sqrt(5e-9 + 1e-8))


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


def paid(counts: list[int], **more: Any) -> Any:
    """A batch of groups of one, with a reward of 1 and so many tokens each."""
    samples = torch.arange(len(counts))
    tokens = SimpleNamespace(owner=samples.repeat_interleave(torch.tensor(counts)))
    rewards = torch.ones(len(counts), dtype=torch.float64)
    return SimpleNamespace(rewards=rewards, groups=samples, sample=samples, tokens=tokens, **more)


def test_a_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    batch = paid([2], behaviour=torch.tensor([-1.0, -2.0]))
    keys: dict[str, Any] = {"objective": "reinforce_pp", "kl_coef": 0.5, "kl_estimator": "k1"}
    pieces = TrainerConfig(**keys).pieces
    _, returns = batch_advantages(batch, pieces, torch.tensor([-1.5, -1.0]), None)
    torch.testing.assert_close(returns, torch.tensor([1.25, 1.5], dtype=torch.float64))


def whiten(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_group_advantages_are_of_the_reward_less_all_penalties() -> None:
    """reinforce_pp_baseline whitens the same advantages."""
    first, second = (0.5 - 0.0) / 2, (1.75 - 0.4) / 2
    expected = [first, -first, -first, second, -second, -second, -second]
    advantages, _ = by_token(advantage="dr_grpo")
    torch.testing.assert_close(advantages, torch.tensor(expected))
    advantages, _ = by_token(objective="reinforce_pp_baseline")
    torch.testing.assert_close(advantages, torch.tensor(whiten(expected)), rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(whitened(torch.full((7,), 0.1).double())) == 0, "none of rounding"
    assert whitened(torch.zeros(0)).numel() == 0


def test_reinforce_pp_whitens_discounted_returns_over_all_tokens() -> None:
    g = 0.5
    third = [-0.1 + g * (-0.2 + g * 0.7), -0.2 + g * 0.7, 0.7]
    returns = [0.5, 0.0, 0.0, 1.75, *third]
    advantages, got = by_token(objective="reinforce_pp", gamma=g)
    torch.testing.assert_close(got, torch.tensor(returns).double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(advantages, torch.tensor(whiten(returns)), rtol=1e-5, atol=1e-6)


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
    """Each sample's longest turn before its own limit."""
    turns = [[10], [80], [85], [90], [100], [45], [60, 60], [30, 85, 10]]
    limits = [100, 100, 100, 100, 100, 50, 100, 100]
    samples = [
        made(
            response=range(sum(own) + len(own) - 1),
            loss_mask=b"\0".join(b"\1" * tokens for tokens in own),
            sampling=Sampling(max_tokens=limit),
        )
        for own, limit in zip(turns, limits, strict=True)
    ]
    batch = paid([sum(own) for own in turns], samples=samples)
    pieces = msgspec.structs.replace(PRESETS["ppo"], overlong_buffer=20)
    advantages, _ = batch_advantages(batch, pieces, None, None)
    expected = torch.tensor([1.0, 1.0, 0.75, 0.5, 0.0, 0.25, 1.0, 0.75])
    torch.testing.assert_close(advantages, expected[batch.tokens.owner])
