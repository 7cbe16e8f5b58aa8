"""Constant weights that correct for the policy that sampled: w = p / mu, bounded.

p is the proximal policy (the trainer's before this batch, or `interpolated`), mu the behaviour
policy. All take and give [N] and have no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from umbra.services.trainer.objectives.ratios import Sequences, bounded_exp


def importance_weights(
    proximal: Tensor, behaviour: Tensor, sequences: Sequences, level: str
) -> Tensor:
    """p / mu of each token, or (level "sequence") the product over its sequence's tokens."""
    log_ratio = (proximal - behaviour).detach()
    return bounded_exp(sequences.sum(log_ratio) if level == "sequence" else log_ratio)


def truncated(weights: Tensor, floor: float, cap: float) -> Tensor:
    """min(max(w, floor), cap); a cap of 0 is none.

    Truncated importance sampling (Ionides 2008; for rollouts of another engine: Yao et al. 2025).
    """
    return weights.clamp(min=floor, max=cap or math.inf)


def masked(weights: Tensor, floor: float, cap: float) -> Tensor:
    """w where floor <= w <= cap, else 0; a cap of 0 is none.

    With a floor it is IcePop (Ring-1T, arXiv 2510.18855), or masked importance sampling; without,
    the cap of AReaL's decoupled PPO (arXiv 2505.24298, behave_imp_weight_cap).
    """
    return torch.where((weights >= floor) & (weights <= (cap or math.inf)), weights, 0.0)


def interpolated(logprobs: Tensor, behaviour: Tensor, versions: Tensor, version: int) -> Tensor:
    """The proximal log p, approximated without a forward pass; no gradient.

    AReaL's log-linear approximation: log p = log mu + alpha (log pi - log mu) with alpha =
    (v_p - v_b) / (v - v_b). v_b is the version that sampled the token, v_p that of the weights
    which the batch found (`version`), v = v_p + 1 the one that is being made. A token of the
    newest version has p = mu.

    Args:
        logprobs: log pi [N].
        behaviour: log mu [N].
        versions: v_b, int64 [N].
        version: v_p.
    """
    age = (version - versions).to(logprobs)
    return behaviour + age / (age + 1) * (logprobs.detach() - behaviour)
