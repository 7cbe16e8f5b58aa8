"""Estimates of KL(pi || other) from the tokens that were sampled, [N] each.

With d = log pi - log other. Source: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from umbra.services.trainer.objectives.ratios import LOG_RATIO_BOUND


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """d: unbiased; as a loss its expected gradient is zero on-policy, so use it in the reward."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """d^2 / 2: biased, but as a loss its on-policy gradient is that of the KL."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased, never negative; GRPO's (arXiv 2402.03300, eq. 4)."""
    difference = logprobs - other
    # expm1 keeps the digits that exp - 1 loses where the policies are close.
    return torch.expm1((-difference).clamp(max=LOG_RATIO_BOUND)) + difference


def k3_plus(logprobs: Tensor, other: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (verl's "k3+")."""
    gradient = k2(logprobs, other)
    return k3(logprobs, other).detach() + gradient - gradient.detach()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_plus": k3_plus,
}
