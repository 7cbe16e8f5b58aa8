"""The loss of every token: advantage x ratio x clip x mask x correction, plus KL, less entropy.

For a token with behaviour probability mu (recorded by the generator), proximal probability p (the
trainer's weights before this batch), current probability pi and advantage A:

    loss = -keep * w * gain(r, A) + kl_coef * KL - entropy_coef * H

    r     pi / mu or pi / p, of the token or of its sequence
    gain  how r and A are combined and clipped
    w     constant weight p / mu, bounded
    keep  0 or 1
    KL    of pi to the reference, or to mu

The pieces are in `terms.py`; `token_weights` makes one number of the tokens' losses.
`services/config/presets.py` has the combinations that have names.

The trust region of an objective with anchor "behaviour" is around the policy that sampled. With
"proximal" it is around p, and with one update per batch pi = p, so that nothing is ever clipped:
give those `minibatches` > 1.

Score centering (Marek and Ryabinin, arXiv 2609.20807) takes off the part of the expected gradient
that no token's advantage decides; `docs/algorithms.md` has its formula and why clips are no part of
it. The generator reports the k likeliest v; all others are one more, with the rest of pi and mu.
That is the paper's estimator, which takes rho pi(v) for mu(v) outside of the head. Where sampling
cuts off tokens the sum is over all that it left in, and exact. A token that a clip or a mask by the
sign of A leaves out has no gradient at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec
from umbra.services.modeling.micro_batch import Supports
from umbra.services.trainer.objectives import terms
from umbra.services.trainer.objectives.terms import Sequences

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
        places, exists = supports.rows(source)
        exists, whole = exists.to(out.device) & ~out.unsqueeze(1), supports.whole[source].to(out)
        behaviour = torch.where(exists, supports.logprobs[places].to(logprobs), 0.0)
        logprobs = torch.where(exists, logprobs, 0.0)
        chance = behaviour.exp() * exists
        rest = (1 - chance.sum(1, keepdim=True)).clamp(min=0)
        pi_rest = 1 - (logprobs.exp() * exists).sum(1, keepdim=True)
        return cls(
            torch.cat([logprobs, pi_rest.clamp(min=LEAST).log()], 1),
            torch.cat([behaviour, rest.clamp(min=LEAST).log()], 1),
            torch.cat([chance, rest * ~(whole | out).unsqueeze(1)], 1),
        )


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """N tokens of whole sequences."""

    logprobs: Tensor  # log pi [N], with gradient
    behaviour: Tensor  # log mu [N]
    proximal: Tensor  # log p [N]
    advantages: Tensor  # A [N]
    sequences: Sequences
    entropy: Tensor  # H [N], with gradient if it is part of the loss
    reference: Tensor | None = None  # log of the reference policy [N]
    candidates: Candidates | None = None  # by which the scores are centered


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses, and what led to them (no gradient), [N] each."""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor  # bool
    kept: Tensor  # bool, neither masked nor of weight 0
    kl: Tensor | None  # to the reference or the behaviour policy, if it is known


class Objective:
    """A policy loss composed of `pieces`."""

    def __init__(self, pieces: ObjectiveSpec) -> None:
        self.pieces = pieces

    def __call__(self, tokens: TokenInputs) -> TokenLosses:
        pieces, advantages = self.pieces, tokens.advantages
        pi, mu = tokens.logprobs, tokens.behaviour
        anchor = tokens.proximal if pieces.anchor == "proximal" else mu
        if pieces.ratio_level == "sequence":
            ratio = terms.sequence_ratio(pi, anchor, tokens.sequences)
        else:
            ratio = terms.ratio(pi, anchor)
        low, high = pieces.clip_low, pieces.clip_high
        match pieces.clip:
            case "ppo":
                gain, clipped = terms.ppo(ratio, advantages, low, high, pieces.dual_clip)
            case "cispo":
                gain, clipped = terms.cispo(ratio, advantages, pi, low, high)
            case "none":  # the importance-weighted policy gradient
                gain, clipped = ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
        weight, keep = self._weight(tokens), self._keep(tokens)
        losses = -torch.where(keep, gain * weight, 0.0)
        if tokens.candidates is not None:
            expected = self._expected(tokens, tokens.candidates, weight)
            inside = ~clipped if pieces.clip == "ppo" else torch.ones_like(keep)
            losses = losses - expected * (inside if pieces.mask == "token" else inside & keep)
        other = tokens.reference if pieces.kl_to == "reference" else mu
        kl = None if other is None else terms.ESTIMATORS[pieces.kl_estimator](pi, other)
        known = None if kl is None else kl.detach()
        if pieces.kl_coef and pieces.kl_in == "loss":
            assert kl is not None
            if pieces.kl_unbiased:
                # An expectation under pi from tokens of mu: by pi / mu, whatever the anchor is.
                kl = kl * terms.ratio(pi, mu)
            losses = losses + pieces.kl_coef * kl
        if pieces.entropy_coef:
            losses = losses - pieces.entropy_coef * tokens.entropy
        clipped, kept = clipped.detach() & (advantages != 0), keep & (weight > 0)
        return TokenLosses(losses, ratio.detach(), clipped, kept, known)

    def _weight(self, tokens: TokenInputs) -> Tensor:
        """Return w of each token [N]."""
        pieces = self.pieces
        if pieces.correction == "none":
            return torch.ones_like(tokens.proximal)
        bound = terms.truncated if pieces.correction == "truncate" else terms.masked
        weight = terms.importance_weights(
            tokens.proximal, tokens.behaviour, tokens.sequences, pieces.is_level
        )
        return bound(weight, pieces.is_floor, pieces.is_cap)

    def _keep(self, tokens: TokenInputs) -> Tensor:
        """Return the tokens that are not masked, bool [N]."""
        pieces, sequences = self.pieces, tokens.sequences
        log_ratio = tokens.proximal - tokens.behaviour
        bounds, threshold = (pieces.mask_low, pieces.mask_high), pieces.mask_threshold
        current = tokens.logprobs, tokens.behaviour, tokens.advantages
        match pieces.mask:
            case "token":
                return terms.within(log_ratio, *bounds)
            case "sequence":
                return terms.within(sequences.sum(log_ratio), *bounds)
            case "geometric":
                return terms.within(sequences.mean(log_ratio), *bounds)
            case "opsm":
                return terms.opsm(*current, sequences, threshold)
            case "probability":
                return terms.probability(*current, threshold)
            case "none":
                return torch.ones_like(log_ratio, dtype=torch.bool)

    def _expected(self, tokens: TokenInputs, candidates: Candidates, weight: Tensor) -> Tensor:
        """Return sum over v of sg(mu(v) slope(v)) log pi(v) [N], with slope(v) = -A c(v).

        That is the slope of the loss had v been drawn, within the trust region. A weight of the
        whole response is the drawn response's. Log pi of another token stands for its log p: they
        are equal in the first update of a batch.
        """
        pieces = self.pieces
        whole = pieces.is_level == "sequence" and pieces.correction != "none"
        single = Objective(
            msgspec.structs.replace(
                pieces,
                clip="none" if pieces.clip == "ppo" else pieces.clip,
                correction="none" if whole else pieces.correction,
                mask="token" if pieces.mask == "token" else "none",
                kl_coef=0.0,
                entropy_coef=0.0,
            )
        )
        logprobs, behaviour = candidates.logprobs.detach().requires_grad_(), candidates.behaviour
        advantages = tokens.advantages.unsqueeze(1).expand_as(logprobs)
        inputs = TokenInputs(
            logprobs, behaviour, logprobs.detach(), advantages, tokens.sequences, logprobs
        )
        with torch.enable_grad():
            slope = torch.autograd.grad(single(inputs).losses.sum(), logprobs)[0]
        if whole:
            slope = slope * weight.unsqueeze(1)
        return (candidates.chance * slope * candidates.logprobs).sum(1)


def token_weights(
    pieces: ObjectiveSpec,
    owner: Tensor,
    own: Tensor,
    part: Tensor,
    updates: int,
    length: int,
    weight: Tensor,
) -> Tensor:
    """Return the weight of each learned token's loss in the sum, float32 [M].

        token_mean     1 / tokens                          (DAPO, arXiv 2503.14476, eq. 8)
        sequence_mean  1 / (sequences * own tokens)        (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum   1 / sequences                       (REINFORCE over whole responses)
        constant       1 / (samples * length)              (Dr. GRPO, arXiv 2503.20783)

    Means count the sequences that are trained, or with denominator "all" all of the batch, those
    without advantage included, as the published objectives do: a share of them for each update.

    Args:
        owner: int64 [M], the sequence of each learned token.
        own: int64 [S], learned tokens of each sequence of the batch.
        part: int64, the sequences that are trained in this update; tokens of others get 0.
        updates: of the batch.
        length: of the longest response.
        weight: float64 [S], what each sequence counts, tokens and all.
    """
    samples, counted = float(weight.sum()) / updates, own * weight
    tokens, sequences = float(counted[part].sum()), float(weight[part].sum())
    if pieces.denominator == "all":
        tokens, sequences = float(counted.sum()) / updates, samples
    divisor: Tensor | float
    match pieces.aggregation:
        case "token_mean":
            divisor = max(tokens, 1.0)
        case "sequence_mean":
            divisor = (sequences * own[owner]).clamp(min=1)
        case "sequence_sum":
            divisor = max(sequences, 1.0)
        case "constant":
            divisor = samples * length
    trained = torch.zeros(len(own), dtype=torch.bool)
    trained[part] = True
    return (trained[owner] / divisor).float() * weight.float()[owner]
