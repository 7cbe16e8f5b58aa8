"""The loss of every token: advantage x ratio x clip x mask x correction, plus KL, less entropy.

For a token with behaviour probability mu (recorded by the generator), proximal probability p (the
trainer's weights before this batch), current probability pi and advantage A:

    loss = -keep * w * gain(r, A) + kl_coef * KL - entropy_coef * H

    r     pi / mu or pi / p, of the token or of its sequence
    gain  how r and A are combined and clipped
    w     constant weight p / mu, bounded
    keep  0 or 1
    KL    of pi to the reference, or to mu

The pieces are in `terms.py`; `aggregation.py` makes one number of the tokens' losses.
`services/config/presets.py` has the combinations that have names.

The trust region of an objective with anchor "behaviour" is around the policy that sampled. With
"proximal" it is around p, and with one update per batch pi = p, so that nothing is ever clipped:
give those `minibatches` > 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec
from umbra.services.trainer.objectives import terms
from umbra.services.trainer.objectives.centering import Candidates
from umbra.services.trainer.objectives.terms import Sequences


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """N tokens of whole sequences."""

    logprobs: Tensor  # log pi [N], with gradient
    behaviour: Tensor  # log mu [N]
    advantages: Tensor  # A [N]
    sequences: Sequences
    entropy: Tensor  # H [N], with gradient if it is part of the loss
    reference: Tensor | None = None  # log of the reference policy [N]
    candidates: Candidates | None = None  # by which the scores are centered


@dataclass(frozen=True, slots=True)
class Constants:
    """The terms that depend on p and mu alone, [N] each."""

    proximal: Tensor  # log p
    weight: Tensor  # w
    keep: Tensor  # bool

    def at(self, source: Tensor, device: torch.device) -> Constants:
        parts = (self.proximal, self.weight, self.keep)
        return Constants(*(part[source].to(device) for part in parts))


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

    def constants(self, proximal: Tensor, behaviour: Tensor, sequences: Sequences) -> Constants:
        """Return weights and masks of the tokens; mask "m2po" wants all of the batch at once."""
        pieces = self.pieces
        log_ratio = proximal - behaviour
        weight = torch.ones_like(proximal)
        if pieces.correction != "none":
            bound = terms.truncated if pieces.correction == "truncate" else terms.masked
            weight = terms.importance_weights(proximal, behaviour, sequences, pieces.is_level)
            weight = bound(weight, pieces.is_floor, pieces.is_cap)
        match pieces.mask:
            case "token":
                keep = terms.within(log_ratio, pieces.mask_low, pieces.mask_high)
            case "sequence":
                keep = terms.within(sequences.sum(log_ratio), pieces.mask_low, pieces.mask_high)
            case "geometric":
                keep = terms.within(sequences.mean(log_ratio), pieces.mask_low, pieces.mask_high)
            case "m2po":
                keep = terms.m2po(log_ratio, pieces.mask_threshold)
            case _:
                keep = torch.ones_like(weight, dtype=torch.bool)
        return Constants(proximal, weight, keep)

    def __call__(self, tokens: TokenInputs, constants: Constants) -> TokenLosses:
        pieces, advantages = self.pieces, tokens.advantages
        anchor = constants.proximal if pieces.anchor == "proximal" else tokens.behaviour
        if pieces.ratio_level == "sequence":
            free = terms.sequence_ratio(tokens.logprobs, anchor, tokens.sequences)
        else:
            free = terms.ratio(tokens.logprobs, anchor)
        gain, clipped = self._gain(free, tokens)
        keep = constants.keep & self._keep_now(tokens)
        kept = keep & (constants.weight > 0)
        if pieces.correction != "none":
            gain = gain * constants.weight
        if pieces.mask != "none":
            gain = torch.where(keep, gain, 0.0)
        losses = -gain
        if tokens.candidates is not None:
            losses = losses - self._expected(tokens, tokens.candidates, constants, keep)
        kl = self._kl(tokens)
        known = None if kl is None else kl.detach()
        if pieces.kl_coef and pieces.kl_in == "loss":
            assert kl is not None
            if pieces.kl_unbiased:
                # An expectation under pi from tokens of mu: by pi / mu, whatever the anchor is.
                kl = kl * terms.ratio(tokens.logprobs, tokens.behaviour)
            losses = losses + pieces.kl_coef * kl
        if pieces.entropy_coef:
            losses = losses - pieces.entropy_coef * tokens.entropy
        return TokenLosses(losses, free.detach(), clipped.detach() & (advantages != 0), kept, known)

    def _expected(
        self, tokens: TokenInputs, candidates: Candidates, constants: Constants, keep: Tensor
    ) -> Tensor:
        """Return sum over v of sg(mu(v) A c(v)) log pi(v) [N].

        A c(v) is the slope of the loss had v been drawn. A weight or a mask of the whole response
        is the drawn response's. Log pi of another token stands for its log p: they are equal in
        the first update of a batch.
        """
        pieces = self.pieces
        whole = pieces.is_level == "sequence" and pieces.correction != "none"
        own = pieces.mask in ("token", "probability")
        single = Objective(
            msgspec.structs.replace(
                pieces,
                correction="none" if whole else pieces.correction,
                mask=pieces.mask if own else "none",
                kl_coef=0.0,
                entropy_coef=0.0,
            )
        )
        now, behaviour = candidates.logprobs.detach().requires_grad_(), candidates.behaviour
        advantages = tokens.advantages.unsqueeze(1).expand_as(now)
        with torch.enable_grad():
            drawn = TokenInputs(now, behaviour, advantages, tokens.sequences, now)
            fixed = single.constants(now.detach(), behaviour, tokens.sequences)
            slope = torch.autograd.grad(single(drawn, fixed).losses.sum(), now)[0]
        if whole:
            slope = slope * constants.weight.unsqueeze(1)
        if not own:
            slope = slope * keep.unsqueeze(1)
        return (candidates.chance * slope * candidates.logprobs).sum(1)

    def _gain(self, free: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor]:
        pieces, advantages = self.pieces, tokens.advantages
        match pieces.clip:
            case "ppo":
                low, high = pieces.clip_low, pieces.clip_high
                return terms.ppo(free, advantages, low, high, pieces.dual_clip)
            case "cispo":
                return terms.cispo(
                    free, advantages, tokens.logprobs, pieces.clip_low, pieces.clip_high
                )
            case "sapo":
                return terms.sapo(free, advantages)
            case "none":
                return terms.unclipped(free, advantages)

    def _keep_now(self, tokens: TokenInputs) -> Tensor:
        """Mask tokens by the current policy."""
        now, mu, threshold = tokens.logprobs, tokens.behaviour, self.pieces.mask_threshold
        match self.pieces.mask:
            case "opsm":
                return terms.opsm(now, mu, tokens.advantages, tokens.sequences, threshold)
            case "probability":
                return terms.probability(now, mu, tokens.advantages, threshold)
            case _:
                return torch.ones_like(now, dtype=torch.bool)

    def _kl(self, tokens: TokenInputs) -> Tensor | None:
        to_reference = self.pieces.kl_to == "reference"
        other = tokens.reference if to_reference else tokens.behaviour
        if other is None:
            return None
        return terms.ESTIMATORS[self.pieces.kl_estimator](tokens.logprobs, other)
