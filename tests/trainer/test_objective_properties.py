"""What holds for every objective: gradients are the loss's, and on-policy they all agree."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbra.services.config.presets import PRESETS, ObjectiveSpec, Preset
from umbra.services.trainer.objectives.objective import (
    Constants,
    Objective,
    TokenInputs,
    TokenLosses,
)
from umbra.services.trainer.objectives.terms import Sequences, m2po

N = 24


def draw(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Sequences]:
    """log pi, log mu, log p, log reference, advantages of 24 tokens in 6 sequences; float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(N, generator=generator, dtype=torch.float64)

    now = -1.5 + noise(0.3)
    owner = torch.randint(0, 6, (N,), generator=generator).sort().values
    advantages = noise(1.0)[owner]
    return (
        now,
        now + noise(spread),
        now + noise(spread),
        now + noise(0.5),
        advantages,
        Sequences(owner, 6),
    )


def run(
    objective: Objective, now: Tensor, seed: int, spread: float, constants: Constants | None = None
) -> tuple[TokenLosses, Constants]:
    _, mu, p, reference, advantages, sequences = draw(seed, spread)
    # An entropy that moves with the logprobs, so that its gradient is seen too.
    tokens = TokenInputs(now, mu, advantages, sequences, 2.0 - now.square() / 5, reference)
    constants = constants or objective.constants(p, mu, sequences)
    return objective(tokens, constants), constants


VARIANTS: dict[str, ObjectiveSpec] = {
    **{name: pieces for name, pieces in PRESETS.items()},
    "dual clip": ObjectiveSpec(dual_clip=1.3),
    "kl k1": ObjectiveSpec(kl_coef=0.3, kl_estimator="k1"),
    "kl k2": ObjectiveSpec(kl_coef=0.3, kl_estimator="k2", kl_unbiased=True),
    "kl k3": ObjectiveSpec(kl_coef=0.3, kl_unbiased=True, ratio_level="sequence"),
    "entropy": ObjectiveSpec(entropy_coef=0.2),
    "sequence weights": ObjectiveSpec(
        anchor="proximal", correction="truncate", is_level="sequence"
    ),
    "opsm": ObjectiveSpec(mask="opsm", mask_threshold=0.05),
    "token mask": ObjectiveSpec(mask="token", mask_low=0.8, mask_high=1.2),
}
# Their losses hold a stopped gradient on purpose: the slope of the value is another one.
STOPPED = {"cispo", "dppo"}


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in STOPPED])
def test_gradients_are_finite_differences_of_the_loss(name: str) -> None:
    objective = Objective(VARIANTS[name])
    for seed in range(3):
        now = draw(seed, 0.4)[0].requires_grad_()
        result, constants = run(objective, now, seed, 0.4)
        result.losses.sum().backward()
        assert now.grad is not None
        step = 1e-6
        for i in range(N):
            values: list[float] = []
            for sign in (1, -1):
                moved = now.detach().clone()
                moved[i] += sign * step
                values.append(float(run(objective, moved, seed, 0.4, constants)[0].losses.sum()))
            slope = (values[0] - values[1]) / (2 * step)
            assert float(now.grad[i]) == pytest.approx(slope, rel=1e-4, abs=1e-6), (seed, i)


@pytest.mark.parametrize("name", PRESETS)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_on_policy_every_preset_is_reinforce(name: Preset, seed: int) -> None:
    """Where pi = p = mu nothing is clipped or masked, and the gradient is -A at every token.

    So for a weight and an advantage that are the same over a sequence, a sequence ratio gives the
    same gradient as a ratio per token.
    """
    pieces = msgspec.structs.replace(PRESETS[name], kl_coef=0.0)
    objective = Objective(pieces)
    now, _, _, _, advantages, sequences = draw(seed, 0.0)
    now.requires_grad_()
    tokens = TokenInputs(now, now.detach(), advantages, sequences, now, None)
    constants = objective.constants(now.detach(), now.detach(), sequences)
    result = objective(tokens, constants)
    result.losses.sum().backward()
    torch.testing.assert_close(result.ratio, torch.ones_like(now))
    torch.testing.assert_close(constants.weight, torch.ones_like(now))
    assert result.kept.all()
    assert not result.clipped.any()
    torch.testing.assert_close(now.grad, -advantages)


@given(seed=st.integers(0, 2**31), threshold=st.floats(1e-4, 2.0))
@settings(max_examples=50, deadline=None)
def test_m2po_keeps_as_many_tokens_as_the_threshold_allows(seed: int, threshold: float) -> None:
    _, mu, p, _, _, _ = draw(seed, 0.5)
    kept = m2po(p - mu, threshold)
    squares = (p - mu).square()
    if kept.any():
        assert squares[kept].mean() < threshold
    if not kept.all():
        assert squares[kept].max() <= squares[~kept].min() if kept.any() else True
        one_more = torch.cat([squares[kept], squares[~kept].min()[None]])
        assert one_more.mean() >= threshold
