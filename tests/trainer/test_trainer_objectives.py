"""Objectives, token by token, against values worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from umbra.services.config import TrainerConfig
from umbra.services.config.presets import PRESETS
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.trainer.learner import learning_rate
from umbra.services.trainer.objectives import terms
from umbra.services.trainer.objectives.aggregation import Counts, count, token_weights
from umbra.services.trainer.objectives.objective import Objective, TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import Sequences, interpolated, masked

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
        advantages=torch.tensor(A).double(),
        sequences=sequences,
        entropy=torch.tensor(entropy or [0.0] * 4).double(),
        reference=reference,
    )
    result = objective(tokens, objective.constants(proximal, behaviour, sequences))
    result.losses.sum().backward()
    assert logprobs.grad is not None
    return replace(result, losses=result.losses.detach()), logprobs.grad


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
        (
            {"objective": "tis", "is_level": "sequence"},
            [-2.6 * 0.64, 3.0 * 0.64, 0.8 * 2, -2.0],
            "1010",
        ),
        ({"objective": "naive", "mask": "token", "mask_low": 0.9}, [0.0, 0.0, 0.8, 0.0], "1010"),
        ({"objective": "naive", "mask": "sequence"}, [-2.6, 3.0, 0.0, 0.0], "1010"),
        # Geometric means of a sequence: 0.8 and sqrt(5) = 2.24.
        (
            {"objective": "sequence_mask", "mask_low": 0.9, "mask_high": 2.3},
            [0.0, 0.0, 0.8, -5.0],
            "1010",
        ),
        # Squared logs of p/mu: .0498 .0498 0 2.59; the mean of the first three is .0332.
        ({"objective": "m2po"}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, 0.0], "1010"),
        ({"objective": "m2po", "mask_threshold": 0.03}, [-2.6 * 0.8, 0.0, 0.8, 0.0], "1010"),
        # Mean log mu/pi of the sequences: -0.182 and (0.693 - 1.609) / 2 = -0.458.
        ({"objective": "ppo", "mask": "opsm"}, [-2.4, 2.4, 0.8, -1.3], "0011"),
        ({"objective": "tis_opsm"}, [-2.6 * 0.8, 3.0 * 0.8, 0.8, -2.0], "1010"),
        ({"objective": "ppo", "dual_clip": 1.25, "clip_high": 0.2}, [-2.4, 2.4, 0.8, -1.2], "0011"),
    ],
    ids=str,
)
def test_objectives(keys: dict[str, Any], losses: list[float], clipped: str) -> None:
    chosen: dict[str, Any] = {"clip_high": 0.3} | keys
    result, gradient = compute(PI, None, **chosen)
    torch.testing.assert_close(result.losses, torch.tensor(losses).double(), rtol=1e-6, atol=1e-7)
    assert "".join(str(int(flag)) for flag in result.clipped) == clipped
    flat = [c == "1" for c in clipped]
    expected = [0.0 if f else loss for f, loss in zip(flat, losses, strict=True)]
    torch.testing.assert_close(gradient, torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def test_bounds_belong_to_what_they_bound() -> None:
    """Values that floats hold exactly, at each bound: kept."""
    weights = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    assert masked(weights, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert masked(weights, 0.25, 0.0).tolist() == [0.25, 0.5, 1.0, 2.0, 4.0]  # no cap
    assert terms.within(torch.zeros(1), 1.0, 1.0).tolist() == [True]
    sequences = Sequences(torch.tensor([0]), 1)
    for drift, kept in ((0.5, True), (0.75, False)):  # mean of log mu - log pi; threshold 0.5
        found = terms.opsm(
            torch.tensor([-1.0]), torch.tensor([drift - 1]), torch.tensor([-1.0]), sequences, 0.5
        )
        assert found.tolist() == [kept]
    # No advantage is no reason to mask.
    none = terms.opsm(torch.zeros(1), torch.ones(1), torch.zeros(1), sequences, 0.5)
    assert none.tolist() == [True]
    # Mean below the threshold, not at it: squares 1 and 3 have the mean 2.
    squares = torch.tensor([1.0, 3.0]).double().sqrt()
    assert terms.m2po(squares, 2.1).tolist() == [True, True]
    assert terms.m2po(torch.tensor([1.0, 1.0]), 1.0).tolist() == [False, False]


def test_a_token_of_weight_zero_is_told_as_masked() -> None:
    """Beyond the cap, though no mask left it out."""
    result, _ = compute(objective="decoupled", clip_high=0.3)
    assert result.kept.tolist() == [True, True, True, False]


def test_a_change_of_probability_is_masked_in_the_direction_that_the_advantage_asks_for() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    now, before = torch.tensor([half, quarter] * 3), torch.tensor([quarter, half] * 3)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    kept = terms.probability(now, before, advantages, 0.2).tolist()
    assert kept == [False, True, True, False, True, False]  # A = 0 counts as A < 0


def test_the_proximal_policy_is_half_way_after_one_version() -> None:
    found = interpolated(
        torch.tensor([-1.0] * 3), torch.tensor([-3.0] * 3), torch.tensor([5, 4, 2]), 5
    )
    assert found.tolist() == [-3.0, -2.0, -1.5]


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant", "token_sum"]
)
def test_one_token_alone_counts_once(aggregation: str) -> None:
    own, part = torch.tensor([1]), torch.tensor([0])
    alone = Tokens(
        ids=torch.arange(3), lengths=torch.tensor([3]), learned=torch.tensor([2]), owner=part
    )
    for trained, expected in ((part, [1.0]), (part[:0], [0.0])):  # of none, too
        counts = count("trained", own, trained, updates=1)
        weights = token_weights(aggregation, alone, trained, counts, length=1)
        assert weights.tolist() == expected


def test_ppo_has_no_dual_clip_unless_it_is_asked_for() -> None:
    gain, flat = terms.ppo(torch.tensor([5.0]), torch.tensor([-1.0]), 0.2, 0.2)
    assert gain.tolist() == [-5.0]
    assert flat.tolist() == [False]


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    result, gradient = compute(
        pi=[0.6, 0.9, 0.2, 0.5], objective="ppo", dual_clip=1.5, clip_high=0.3
    )
    # The second token has r = 1.8 and A = -2: -c A = 3 instead of 3.6.
    assert result.losses[1] == pytest.approx(3.0)
    assert result.clipped.tolist() == [False, True, True, True]
    assert gradient[1] == 0


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    result, gradient = compute(objective="cispo", clip_high=1.0)
    weights = [1.2, 1.2, 0.5, 2.0]
    losses = [-w * a * math.log(x) for w, a, x in zip(weights, A, PI, strict=True)]
    torch.testing.assert_close(result.losses, torch.tensor(losses).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient, torch.tensor([-w * a for w, a in zip(weights, A, strict=True)]).double()
    )
    assert result.clipped.tolist() == [False, False, False, True]


def test_sapo_fades() -> None:
    result, gradient = compute(objective="sapo")
    ratios = [1.2, 1.2, 0.5, 5.0]
    for i, (r, a) in enumerate(zip(ratios, A, strict=True)):
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        assert result.losses[i] == pytest.approx(-4 / tau * gate * a)
        assert gradient[i] == pytest.approx(-4 * gate * (1 - gate) * r * a)


def test_gspo_has_one_ratio_per_sequence() -> None:
    result, gradient = compute(objective="gspo", clip_low=0.7, clip_high=0.7)
    # Geometric means of pi/mu: 1.2 and sqrt(2.5) = 1.58; both within the clip.
    first, second = 1.2, math.sqrt(2.5)
    expected = [-first * 2, first * 2, second, -second]
    torch.testing.assert_close(result.losses, torch.tensor(expected).double())
    # d s / d log pi_t = s / 2 for both tokens of a sequence, whose advantages cancel here.
    torch.testing.assert_close(gradient, torch.zeros(4).double())


def test_prime_rl_masks_by_the_change_of_probability_and_holds_on_to_the_behaviour() -> None:
    result, gradient = compute(objective="prime_rl", mask_threshold=0.25)
    # pi - mu = 0.1, 0.1, -0.2, 0.4: the last went too far up.
    logs = [math.log(x) for x in (1.2, 1.2, 0.5, 5.0)]
    gains = [-2.4, 2.4, 0.5, 0.0]
    expected = [g + 1e-3 * x * x for g, x in zip(gains, logs, strict=True)]
    slopes = [g + 2e-3 * x for g, x in zip(gains, logs, strict=True)]
    torch.testing.assert_close(result.losses, torch.tensor(expected).double())
    torch.testing.assert_close(gradient, torch.tensor(slopes).double())
    assert result.kept.tolist() == [True, True, True, False]


def test_opsm_leaves_out_what_drifted_and_was_bad() -> None:
    # Mean log mu/pi of the second sequence: (log 4 + 0) / 2 = 0.69.
    pi = [0.6, 0.6, 0.1, 0.1]
    result, gradient = compute(pi=pi, mask="opsm", mask_threshold=0.5)
    assert result.kept.tolist() == [True, True, False, True]
    assert gradient[2] == 0
    kept, _ = compute(pi=pi, mask="opsm", mask_threshold=0.7)
    assert kept.kept.all()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
        ("k3_plus", lambda d: math.exp(-d) + d - 1, lambda d: d),
    ],
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_in_the_loss(estimator: str, value: Any, slope: Any, unbiased: bool) -> None:
    plain, plain_gradient = compute(objective="ppo", clip="none")
    keys = {"objective": "ppo", "kl_coef": 0.5, "kl_estimator": estimator, "kl_unbiased": unbiased}
    result, gradient = compute(clip="none", **keys)
    for i, (now, ref, mu) in enumerate(zip(PI, REF, MU, strict=True)):
        d, r = math.log(now / ref), (now / mu if unbiased else 1.0)
        added, steeper = value(d) * r, slope(d) * r + (value(d) * r if unbiased else 0.0)
        assert float(result.losses[i] - plain.losses[i]) == pytest.approx(0.5 * added)
        assert float(gradient[i] - plain_gradient[i]) == pytest.approx(0.5 * steeper, abs=1e-9)
    assert result.kl is not None
    assert result.kl.tolist() == pytest.approx(
        [value(math.log(x / y)) for x, y in zip(PI, REF, strict=True)]
    )


def test_the_entropy_bonus_is_taken_off() -> None:
    plain, _ = compute()
    result, _ = compute(entropy=[1.0, 2.0, 3.0, 4.0], entropy_coef=0.1)
    torch.testing.assert_close(
        plain.losses - result.losses, torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    )


def test_a_hopeless_ratio_stays_finite() -> None:
    objective = Objective(TrainerConfig(objective="tis").pieces)
    far = torch.tensor([-1e4]).requires_grad_()
    sequences = Sequences(torch.zeros(1, dtype=torch.int64), 1)
    one = torch.tensor([-1.0])
    constants = objective.constants(torch.zeros(1), far.detach(), sequences)
    result = objective(TokenInputs(far, torch.zeros(1), one, sequences, one), constants)
    result.losses.sum().backward()
    assert torch.isfinite(result.losses).all()
    assert far.grad is not None
    assert torch.isfinite(far.grad).all()


def three_sequences() -> Tokens:
    """Sequences with 1, 3 and 2 learned tokens."""
    return Tokens(
        ids=torch.arange(12),
        lengths=torch.tensor([3, 5, 4]),
        learned=torch.tensor([2, 5, 6, 7, 10, 11]),
        owner=torch.tensor([0, 1, 1, 1, 2, 2]),
    )


@pytest.mark.parametrize(
    ("aggregation", "trained", "everything"),
    [
        ("token_mean", [1 / 5] * 5, [1 / 6] * 5),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4], [1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("sequence_sum", [1 / 2] * 5, [1 / 3] * 5),
        ("constant", [1 / 30] * 5, [1 / 30] * 5),
        ("token_sum", [1.0] * 5, [1.0] * 5),
    ],
)
def test_aggregations_leave_out_what_is_not_trained(
    aggregation: str, trained: list[float], everything: list[float]
) -> None:
    part, own = torch.tensor([1, 2]), torch.tensor([1, 3, 2])
    for denominator, expected in (("trained", trained), ("all", everything)):
        counts = count(denominator, own, part, updates=1)
        weights = token_weights(aggregation, three_sequences(), part, counts, length=10)
        torch.testing.assert_close(weights, torch.tensor([0.0, *expected]))


def test_of_several_updates_each_counts_its_share() -> None:
    own, part = torch.tensor([1, 3, 2]), torch.tensor([1])
    assert count("trained", own, part, updates=2) == Counts(3.0, 1, 1.5)
    assert count("all", own, part, updates=2) == Counts(3.0, 1.5, 1.5)


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
