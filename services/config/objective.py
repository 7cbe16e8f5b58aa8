"""The keys of `[trainer]` that say what the policy is trained to do.

`trainer.objective` names a preset, which stands for one value of every piece (`presets.py`); a key
of the same name as a piece changes that piece alone.
"""

from __future__ import annotations

import msgspec

from umbra.services.config.keys import Section, key
from umbra.services.config.presets import (
    PRESETS,
    Advantage,
    Aggregation,
    Anchor,
    Correction,
    Denominator,
    KlEstimator,
    KlPolicy,
    Level,
    Mask,
    ObjectiveSpec,
    Preset,
    Proximal,
)


class ObjectiveKeys(Section):
    """The preset and the keys that change one of its pieces; None leaves it as in the preset."""

    objective: Preset = key(
        "tis_opsm", "preset of the policy loss; the keys below change its pieces"
    )
    advantage: Advantage | None = key(
        None,
        "reward - group mean; that over the std; reward - mean of the others; return or reward "
        "- group mean, whitened over the batch; or by a value model (gae)",
    )
    gamma: float | None = key(None, "discount per token (reinforce_pp, gae)", ge=0, le=1)
    gae_lambda: float | None = key(None, "lambda of generalised advantage estimation", ge=0, le=1)
    overlong_buffer: int | None = key(
        None, "last tokens before the longest turn's limit that cost reward (DAPO); 0 = none", ge=0
    )
    overlong_filter: bool | None = key(None, "leave out what was cut off at the token limit (DAPO)")
    anchor: Anchor | None = key(
        None,
        "denominator of the ratio: the policy that sampled, or the trainer's before this batch "
        "(proximal)",
    )
    proximal: Proximal | None = key(
        None,
        "logprobs of the proximal policy: a forward pass, the scoring stage logp, or log-linear"
        " between behaviour and current policy",
    )
    clip_low: float | None = key(None, "ratio clip below: 1 - clip_low", gt=0)
    clip_high: float | None = key(None, "ratio clip above: 1 + clip_high", gt=0)
    dual_clip: float | None = key(
        None, "bound of the ratio where the advantage is negative, > 1; 0 = off", ge=0
    )
    correction: Correction | None = key(
        None, "weight proximal / behaviour: none, truncated to is_floor..is_cap, or 0 outside"
    )
    is_level: Level | None = key(None, "that weight per token, or the product of a sequence")
    is_floor: float | None = key(None, "least such weight; 0 = none", ge=0)
    is_cap: float | None = key(None, "largest such weight; 0 = none", ge=0)
    mask: Mask | None = key(
        None,
        "what is left out: tokens, sequences by product or by geometric mean with proximal / "
        "behaviour outside mask_low..mask_high; or by a rule with mask_threshold",
    )
    mask_low: float | None = key(None, "least ratio that is kept", ge=0)
    mask_high: float | None = key(None, "largest ratio that is kept", gt=0)
    mask_threshold: float | None = key(
        None,
        "m2po: mean squared log ratio; opsm: mean log ratio of a sequence; probability: change "
        "of a token's probability",
        gt=0,
    )
    aggregation: Aggregation | None = key(
        None,
        "of the token losses: mean over tokens, mean over sequences of their means or sums, sum"
        " over the longest turn's tokens, or sum",
    )
    denominator: Denominator | None = key(
        None, "samples that a mean counts: those with an advantage, or all"
    )
    kl_coef: float | None = key(None, "weight of the KL term; 0 = off", ge=0)
    kl_estimator: KlEstimator | None = key(None, "estimate of the KL per token")
    kl_to: KlPolicy | None = key(None, "KL to the reference model, or to what sampled")
    kl_unbiased: bool | None = key(None, "multiply the KL by pi / mu of the token (DeepSeek-V3.2)")
    entropy_coef: float | None = key(None, "weight of the entropy bonus; 0 = off", ge=0)

    @property
    def chosen(self) -> dict[str, object]:
        """The pieces that have a key of their own, by name."""
        values = {name: getattr(self, name, None) for name in ObjectiveSpec.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def pieces(self) -> ObjectiveSpec:
        """What the preset and the keys come to."""
        return msgspec.structs.replace(PRESETS[self.objective], **self.chosen)
