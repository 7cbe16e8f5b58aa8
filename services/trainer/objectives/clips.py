"""What a token gains, given its ratio r and its advantage A, and where that gain has no gradient.

Every function returns the gains and the tokens that are clipped (no gradient), [N] each.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05  # temperatures of SAPO's gate, as in the paper


def ppo(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A).

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
    """sg(clip(r, 1 - low, 1 + high)) A log pi.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5). The weight is clipped and not the gradient: every
    token keeps one. The clipped tokens returned are those whose weight is.
    """
    weight = ratio.detach()
    clipped = weight.clamp(1 - low, 1 + high)
    return clipped * advantages * logprobs, clipped != weight


def sapo(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(4 / tau) sigmoid(tau (r - 1)) A, with tau = 1 where A > 0 and else 1.05.

    SAPO, arXiv 2511.20347. The gate fades instead of clipping, so no token counts as clipped.
    """
    tau = torch.where(advantages > 0, SAPO_POSITIVE, SAPO_NEGATIVE).to(ratio)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return gate * advantages, torch.zeros_like(ratio, dtype=torch.bool)


def unclipped(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """r A: the importance-weighted policy gradient."""
    return ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
