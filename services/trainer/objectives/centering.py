"""Score centering (Marek and Ryabinin, arXiv 2609.20807): no drift where mu is not pi.

The expected gradient of an objective at a prefix is sum_a mu(a) A(a) c(a) s(a), with the score s(a)
= grad log pi(a) and a coefficient c that clip, weight and mask decide. Its part that does not
depend on what A says of the tokens, A times b = sum_v mu(v) c(v) s(v), is zero where mu = pi and
c = 1, and elsewhere moves the policy by no reason, always the same way. Centering takes A b off:

    loss -= A sum_v sg(mu(v) c(v)) log pi(v)

The generator reports the k likeliest v; all others are one more, with the rest of pi and mu. That
is the paper's estimator, which takes rho pi(v) for mu(v) outside of the head. Where sampling
cuts off tokens the sum is over all that it left in, and exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.modeling.micro_batch import Supports

LEAST = 1e-6  # probability of all others together: below it, the rest is rounding


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that could have been drawn in place of each of N: k ids, and all others as one."""

    logprobs: Tensor  # log pi [N, k + 1], with gradient
    behaviour: Tensor  # log mu [N, k + 1]
    chance: Tensor  # mu [N, k + 1]; 0 where there is none

    @classmethod
    def of(cls, supports: Supports, source: Tensor, logprobs: Tensor, out: Tensor) -> Candidates:
        """Return the candidates of the tokens `source`, none for tokens that are `out`, bool [N].

        `logprobs` are log pi [N, k] of the ids, as `Scorer` finds them.
        """
        at, there = supports.rows(source)
        there, whole = there.to(out.device) & ~out.unsqueeze(1), supports.whole[source].to(out)
        behaviour = torch.where(there, supports.logprobs[at].to(logprobs), 0.0)
        logprobs = torch.where(there, logprobs, 0.0)
        chance = behaviour.exp() * there
        rest = (1 - chance.sum(1, keepdim=True)).clamp(min=0)
        left = 1 - (logprobs.exp() * there).sum(1, keepdim=True)
        return cls(
            torch.cat([logprobs, left.clamp(min=LEAST).log()], 1),
            torch.cat([behaviour, rest.clamp(min=LEAST).log()], 1),
            torch.cat([chance, rest * ~(whole | out).unsqueeze(1)], 1),
        )
