"""Which tokens are kept, bool [N]. Masked tokens stay in the denominator of the mean.

p is the proximal policy, mu the behaviour policy, pi the current one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.trainer.objectives.ratios import Sequences, bounded_exp


def within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """low <= exp(log_ratio) <= high.

    With log(p / mu) of a token it is a token mask; with its sum over the sequence a sequence mask;
    with its mean the geometric sequence mask (OpenRLHF's seq-mask-tis; SkyRL recommends bounds of
    0.99 and 1.01). verl calls them rollout rejection.
    """
    ratio = bounded_exp(log_ratio)
    return (ratio >= low) & (ratio <= high)


def m2po(log_ratio: Tensor, threshold: float) -> Tensor:
    """Mask the largest (log p/mu)^2 until the mean of the rest is below `threshold`.

    M2PO (arXiv 2510.01161), as AReaL implements it. It looks at all tokens of the batch at once.
    """
    squares = log_ratio.double().square()
    order = squares.argsort(stable=True)
    count = torch.arange(1, len(order) + 1, device=order.device)
    mean = squares[order].cumsum(0) / count  # of the k smallest; it grows with k
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order[mean < threshold]] = True
    return kept


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
