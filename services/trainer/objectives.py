"""Policy losses, composed of a ratio, a clip, an importance weight and an aggregation.

For a token with behaviour probability mu (recorded by the generator), proximal probability p (the
trainer's weights before this batch) and current probability pi, and with advantage A:

    loss = -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    preset     r       w (constant)                    source
    ppo        pi/mu   1                               PPO, arXiv 1707.06347
    tis        pi/p    min(p/mu, is_cap)               truncated importance sampling
    decoupled  pi/p    p/mu, or 0 where above is_cap   AReaL, arXiv 2505.24298, eq. 4-5
    naive      pi/p    1                               no correction: shows what staleness costs

`decoupled` drops a token above the cap, as AReaL's behave_imp_weight_cap does; with clamping it
would be `tis`. Dropped and clipped tokens stay in the denominator of the mean.

The trust region of `ppo` is around the policy that sampled. That of the others is around p, so with
one update per batch pi = p and nothing is ever clipped: give them `minibatches` > 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.modeling.packing import Tokens
from umbra.services.runtime.config import Trainer

LOG_RATIO_BOUND = 20.0  # exp of more overflows half precision and means nothing any more


def ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """exp(logprobs - anchor), with the difference clamped to +-20."""
    return (logprobs - anchor).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncated(weights: Tensor, cap: float) -> Tensor:
    """Weights of at most `cap`: large ones count as the cap."""
    return weights.clamp(max=cap)


def dropped(weights: Tensor, cap: float) -> Tensor:
    """Weights of at most `cap`: larger ones count as zero."""
    return torch.where(weights <= cap, weights, 0.0)


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss of each token; `around_proximal` chooses p as the anchor of the ratio instead of mu."""

    around_proximal: bool
    bound: Callable[[Tensor, float], Tensor] | None
    clip_low: float
    clip_high: float
    is_cap: float

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The losses and which tokens are clipped (no gradient), [N] each.

        Args:
            logprobs: log pi [N], with gradient.
            behaviour: log mu [N].
            proximal: log p [N].
            advantages: A [N].
        """
        anchor = proximal if self.around_proximal else behaviour
        free = ratio(logprobs, anchor)
        clipped = free.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(free * advantages, clipped * advantages)
        if self.bound is not None:
            gain = gain * self.bound(ratio(proximal, behaviour), self.is_cap).detach()
        return -gain, (clipped * advantages < free * advantages).detach()


def make_objective(config: Trainer) -> Objective:
    """The preset that `trainer.objective` names."""
    around_proximal, bound = {
        "ppo": (False, None),
        "tis": (True, truncated),
        "decoupled": (True, dropped),
        "naive": (True, None),
    }[config.objective]
    return Objective(around_proximal, bound, config.clip_low, config.clip_high, config.is_cap)


def token_weights(
    aggregation: str, tokens: Tokens, sequences: Tensor, *, samples: float, length: int
) -> Tensor:
    """What each learned token's loss is multiplied with before all are summed, float32 [M].

    `sequences` (int64) are those trained in this update; tokens of others get 0. Counts are those
    of the whole update, so the sum over micro-batches does not depend on how it was cut up.

        token_mean     1 / learned tokens of `sequences`                     (DAPO)
        sequence_mean  1 / (number of `sequences` * own learned tokens)      (GRPO)
        constant       1 / (`samples` * `length`)                            (Dr. GRPO)

    Samples without advantage are not among `sequences`: they add nothing to the sum, and the two
    means leave them out of the count as well. `samples` counts all samples of the update, and
    `length` is the constant that stands for their length.
    """
    chosen = torch.zeros(len(tokens.lengths), dtype=torch.bool)
    chosen[sequences] = True
    trained = chosen[tokens.owner]
    if aggregation == "token_mean":
        weight = trained / trained.sum().clamp(min=1)
    elif aggregation == "sequence_mean":
        own = torch.bincount(tokens.owner, minlength=len(tokens.lengths))
        weight = trained / (len(sequences) * own[tokens.owner]).clamp(min=1)
    elif aggregation == "constant":
        weight = trained / (samples * length)
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}")
    return weight.float()
