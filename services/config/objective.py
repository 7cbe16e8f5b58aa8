"""The keys of `[trainer]` that say what the policy is trained to do.

`trainer.objective` names a preset, which stands for one value of every piece (`presets.py`); a key
of the same name as a piece changes that piece alone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from umbra.services.config.base import Section
from umbra.services.config.presets import (
    PRESETS,
    Advantage,
    Aggregation,
    Anchor,
    Clip,
    Correction,
    Denominator,
    KlEstimator,
    KlPlace,
    KlPolicy,
    Level,
    Mask,
    ObjectiveSpec,
    Preset,
    Proximal,
)

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]


class ObjectiveKeys(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The preset and the keys that change one of its pieces; None leaves it as in the preset."""

    objective: Annotated[
        Preset, Meta(description="preset of the policy loss; the keys below change its pieces")
    ] = "tis_opsm"
    advantage: Annotated[
        Advantage | None,
        Meta(
            description="reward - group mean; that over the std; reward - mean of the others; "
            "return or reward - group mean, whitened over the batch; or by a value model (gae)"
        ),
    ] = None
    gamma: Annotated[Share | None, Meta(description="discount per token (reinforce_pp, gae)")] = (
        None
    )
    gae_lambda: Annotated[
        Share | None, Meta(description="lambda of generalised advantage estimation")
    ] = None
    overlong_buffer: Annotated[
        Count | None,
        Meta(description="last tokens before response_limit that cost reward (DAPO); 0 = none"),
    ] = None
    overlong_factor: Annotated[
        Positive | None, Meta(description="reward that a response of response_limit tokens loses")
    ] = None
    overlong_filter: Annotated[
        bool | None, Meta(description="leave out what was cut off at the token limit (DAPO)")
    ] = None
    ratio_level: Annotated[
        Level | None, Meta(description="a ratio per token, or the geometric mean of a sequence")
    ] = None
    anchor: Annotated[
        Anchor | None,
        Meta(
            description="denominator of the ratio: the policy that sampled, or the trainer's "
            "before this batch (proximal)"
        ),
    ] = None
    proximal: Annotated[
        Proximal | None,
        Meta(
            description="logprobs of the proximal policy: a forward pass, the scoring stage logp, "
            "or log-linear between behaviour and current policy"
        ),
    ] = None
    clip: Annotated[
        Clip | None,
        Meta(
            description="PPO's minimum, CISPO's clipped weight, SAPO's soft gate, or the ratio as "
            "it is"
        ),
    ] = None
    clip_low: Annotated[Positive | None, Meta(description="ratio clip below: 1 - clip_low")] = None
    clip_high: Annotated[Positive | None, Meta(description="ratio clip above: 1 + clip_high")] = (
        None
    )
    dual_clip: Annotated[
        NotNegative | None,
        Meta(description="bound of the ratio where the advantage is negative, > 1; 0 = off"),
    ] = None
    correction: Annotated[
        Correction | None,
        Meta(
            description="weight proximal / behaviour: none, truncated to is_floor..is_cap, or 0 "
            "outside"
        ),
    ] = None
    is_level: Annotated[
        Level | None, Meta(description="that weight per token, or the product of a sequence")
    ] = None
    is_floor: Annotated[NotNegative | None, Meta(description="least such weight; 0 = none")] = None
    is_cap: Annotated[NotNegative | None, Meta(description="largest such weight; 0 = none")] = None
    mask: Annotated[
        Mask | None,
        Meta(
            description="what is left out: tokens, sequences by product or by geometric mean with "
            "proximal / behaviour outside mask_low..mask_high; or by a rule with mask_threshold"
        ),
    ] = None
    mask_low: Annotated[NotNegative | None, Meta(description="least ratio that is kept")] = None
    mask_high: Annotated[Positive | None, Meta(description="largest ratio that is kept")] = None
    mask_threshold: Annotated[
        Positive | None,
        Meta(
            description="m2po: mean squared log ratio; opsm: mean log ratio of a sequence; "
            "probability: change of a token's probability"
        ),
    ] = None
    aggregation: Annotated[
        Aggregation | None,
        Meta(
            description="of the token losses: mean over tokens, mean over sequences of their means "
            "or sums, sum over a constant length, or sum"
        ),
    ] = None
    denominator: Annotated[
        Denominator | None,
        Meta(description="samples that a mean counts: those with an advantage, or all"),
    ] = None
    kl_coef: Annotated[NotNegative | None, Meta(description="weight of the KL term; 0 = off")] = (
        None
    )
    kl_estimator: Annotated[
        KlEstimator | None, Meta(description="estimate of the KL per token")
    ] = None
    kl_to: Annotated[
        KlPolicy | None, Meta(description="KL to the reference model, or to what sampled")
    ] = None
    kl_in: Annotated[
        KlPlace | None, Meta(description="KL as part of the loss, or of the reward")
    ] = None
    kl_unbiased: Annotated[
        bool | None, Meta(description="multiply the KL by the ratio (DeepSeek-V3.2)")
    ] = None
    entropy_coef: Annotated[
        NotNegative | None, Meta(description="weight of the entropy bonus; 0 = off")
    ] = None
    response_limit: Annotated[
        int,
        Meta(
            description="tokens of the longest response (aggregation constant, overlong_buffer); "
            "0 = sampling.max_tokens, the most of any environment",
            ge=0,
        ),
    ] = 0

    @property
    def chosen(self) -> dict[str, object]:
        """The pieces that have a key of their own, by name."""
        values = {name: getattr(self, name) for name in ObjectiveSpec.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def pieces(self) -> ObjectiveSpec:
        """What the preset and the keys come to."""
        return msgspec.structs.replace(PRESETS[self.objective], **self.chosen)
