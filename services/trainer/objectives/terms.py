"""The pieces of a token's loss, each a function of [N] tokens; `objective.py` composes them.

pi is the current policy, mu the behaviour policy, p the proximal one, r a ratio, A an advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp of more overflows half precision and means nothing any more


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which of N tokens belong together. A sequence is whole or not there at all."""

    owner: Tensor  # int64 [N], in 0 .. count - 1
    count: int

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count).index_add(0, self.owner, values)[self.owner]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sum(torch.ones_like(values))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return exp(logprobs - anchor) of each token [N]."""
    return bounded_exp(logprobs - anchor)


def sequence_ratio(logprobs: Tensor, anchor: Tensor, sequences: Sequences) -> Tensor:
    """Return s = exp(mean over the sequence's tokens of (logprobs - anchor)), at every token [N].

    GSPO, arXiv 2507.18071, eq. 7. The gradient reaches all tokens of the sequence alike.
    """
    return bounded_exp(sequences.mean(logprobs - anchor))


# -- gains: each returns them and, without gradient, the clipped tokens ---------------------------


def ppo(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A).

    PPO, arXiv 1707.06347, eq. 7; with high > low it is DAPO's clip-higher (arXiv 2503.14476). With
    `dual` > 1 the gain is at least dual * A where A < 0 (dual-clip PPO, arXiv 1912.09729), which
    bounds the ratio there; TRL calls it `delta`.
    """
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    flat = clipped * advantages < ratio * advantages
    if dual:
        floor = dual * advantages
        below = (advantages < 0) & (gain < floor)
        gain, flat = torch.where(below, floor, gain), flat | below
    return gain, flat


def cispo(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return sg(clip(r, 1 - low, 1 + high)) A log pi.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5). The weight is clipped and not the gradient: every
    token keeps one. The clipped tokens returned are the ones whose weight is clipped.
    """
    weight = ratio.detach()
    clipped = weight.clamp(1 - low, 1 + high)
    return clipped * advantages * logprobs, clipped != weight


# -- masks: which tokens are kept; masked ones stay in the denominator of the mean -----------------


def within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Return low <= exp(log_ratio) <= high.

    With log(p / mu) of a token it is a token mask; with its sum over the sequence a sequence mask;
    with its mean the geometric sequence mask (OpenRLHF's seq-mask-tis; SkyRL recommends bounds of
    0.99 and 1.01). verl calls them rollout rejection.
    """
    ratio = bounded_exp(log_ratio)
    return (ratio >= low) & (ratio <= high)


def opsm(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, sequences: Sequences, threshold: float
) -> Tensor:
    """Mask tokens with A < 0 in a sequence where mean(log mu - log pi) > `threshold`.

    Off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    drift = sequences.mean((behaviour - logprobs).detach())
    return (advantages >= 0) | (drift <= threshold)


def probability(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, threshold: float
) -> Tensor:
    """Mask tokens whose probability went too far in the direction that the advantage asks for.

    With d = pi - mu: masked where A > 0 and d > threshold, or A <= 0 and d < -threshold (prime-rl's
    default loss; DPPO in verl).
    """
    change = logprobs.detach().exp() - behaviour.exp()
    return torch.where(advantages > 0, change <= threshold, change >= -threshold)


# -- constant weights that correct for the policy that sampled: w = p / mu, bounded ----------------


def importance_weights(
    proximal: Tensor, behaviour: Tensor, sequences: Sequences, level: str
) -> Tensor:
    """Return p / mu of each token, or (level "sequence") the product over its sequence's tokens."""
    log_ratio = (proximal - behaviour).detach()
    return bounded_exp(sequences.sum(log_ratio) if level == "sequence" else log_ratio)


def truncated(weights: Tensor, floor: float, cap: float) -> Tensor:
    """Return min(max(w, floor), cap); a cap of 0 is none.

    Truncated importance sampling (Ionides 2008; for rollouts of another engine: Yao et al. 2025).
    """
    return weights.clamp(min=floor, max=cap or math.inf)


def masked(weights: Tensor, floor: float, cap: float) -> Tensor:
    """Return w where floor <= w <= cap, else 0; a cap of 0 is none.

    With a floor it is IcePop (Ring-1T, arXiv 2510.18855), or masked importance sampling; without,
    the cap of AReaL's decoupled PPO (arXiv 2505.24298, behave_imp_weight_cap).
    """
    return torch.where((weights >= floor) & (weights <= (cap or math.inf)), weights, 0.0)


# -- estimates of KL(pi || other) from sampled tokens, d = log pi - log other ----------------------
# Source: Schulman, "Approximating KL divergence" (2020).


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return d: unbiased; its expected gradient as a loss is 0 on-policy: use it in the reward."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return d^2 / 2: biased, but as a loss its on-policy gradient is the KL's."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return exp(-d) + d - 1: unbiased, never negative; GRPO's (arXiv 2402.03300, eq. 4)."""
    difference = logprobs - other
    # expm1 keeps the digits that exp - 1 loses where the policies are close.
    return torch.expm1((-difference).clamp(max=LOG_RATIO_BOUND)) + difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
