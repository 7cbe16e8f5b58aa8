"""Presets of the policy loss: each is one value for every piece.

`docs/algorithms.md` has the formulas, `services/trainer/objectives/` computes them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Preset = Literal[
    "ppo", "naive", "tis", "tis_opsm", "decoupled", "icepop", "sequence_mask", "m2po", "prime_rl",
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo",
    "sapo", "dppo", "ppo_critic", "opd",
]  # fmt: skip
Advantage = Literal[
    "dr_grpo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "teacher"
]  # fmt: skip
Level = Literal["token", "sequence"]
Anchor = Literal["behaviour", "proximal"]
Proximal = Literal["recompute", "stage", "interpolate"]
Clip = Literal["ppo", "cispo", "sapo", "none"]
Correction = Literal["none", "truncate", "mask"]
Mask = Literal["none", "token", "sequence", "geometric", "m2po", "opsm", "probability"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "token_sum"]
Denominator = Literal["trained", "all"]
KlEstimator = Literal["k1", "k2", "k3", "k3_plus"]
KlPolicy = Literal["reference", "behaviour"]
KlPlace = Literal["loss", "reward"]


class ObjectiveSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One value for every piece; the defaults are those of preset `ppo`."""

    advantage: Advantage = "dr_grpo"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    overlong_buffer: int = 0
    overlong_filter: bool = False
    ratio_level: Level = "token"
    anchor: Anchor = "behaviour"
    proximal: Proximal = "recompute"
    clip: Clip = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    correction: Correction = "none"
    is_level: Level = "token"
    is_floor: float = 0.0
    is_cap: float = 2.0
    mask: Mask = "none"
    mask_low: float = 0.5
    mask_high: float = 2.0
    mask_threshold: float = 0.2
    aggregation: Aggregation = "token_mean"
    denominator: Denominator = "trained"
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_to: KlPolicy = "reference"
    kl_in: KlPlace = "loss"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss needs logprobs of the proximal policy."""
        return (
            self.anchor == "proximal"
            or self.correction != "none"
            or self.mask in ("token", "sequence", "geometric", "m2po")
        )

    @property
    def needs_critic(self) -> bool:
        """Whether advantages are made of a value model's values."""
        return self.advantage == "gae"

    @property
    def regularised(self) -> bool:
        """Whether a sample without advantage has a gradient nevertheless."""
        return self.entropy_coef > 0 or (self.kl_coef > 0 and self.kl_in == "loss")

    @property
    def by_sequence(self) -> bool:
        """Whether a ratio or a mask is that of a whole response."""
        return (
            self.ratio_level == "sequence"
            or (self.correction != "none" and self.is_level == "sequence")
            or self.mask in ("sequence", "geometric", "opsm")
        )


# Published objectives count every sample of the batch, those without advantage included.
PRESETS: dict[Preset, ObjectiveSpec] = {
    "ppo": ObjectiveSpec(),
    "naive": ObjectiveSpec(anchor="proximal"),
    "tis": ObjectiveSpec(anchor="proximal", correction="truncate"),
    "tis_opsm": ObjectiveSpec(anchor="proximal", correction="truncate", mask="opsm"),
    "decoupled": ObjectiveSpec(anchor="proximal", correction="mask"),
    "icepop": ObjectiveSpec(anchor="proximal", correction="mask", is_floor=0.5, is_cap=5.0),
    "sequence_mask": ObjectiveSpec(
        anchor="proximal",
        correction="truncate",
        is_cap=0.0,
        mask="geometric",
        mask_low=0.99,
        mask_high=1.01,
    ),
    "m2po": ObjectiveSpec(
        anchor="proximal", correction="mask", is_cap=5.0, mask="m2po", mask_threshold=0.04
    ),
    "prime_rl": ObjectiveSpec(
        clip="none",
        mask="probability",
        mask_threshold=0.2,
        kl_to="behaviour",
        kl_estimator="k2",
        kl_coef=2e-3,
        denominator="all",
    ),
    "grpo": ObjectiveSpec(advantage="grpo", aggregation="sequence_mean", denominator="all"),
    "dr_grpo": ObjectiveSpec(aggregation="constant", denominator="all"),
    "dapo": ObjectiveSpec(advantage="grpo", clip_high=0.28, denominator="all"),
    "rloo": ObjectiveSpec(advantage="rloo", aggregation="sequence_sum", denominator="all"),
    "reinforce_pp": ObjectiveSpec(
        advantage="reinforce_pp", denominator="all", kl_in="reward", kl_estimator="k1"
    ),
    "reinforce_pp_baseline": ObjectiveSpec(
        advantage="reinforce_pp_baseline", denominator="all", kl_estimator="k2"
    ),
    "gspo": ObjectiveSpec(
        advantage="grpo",
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
        denominator="all",
    ),
    "cispo": ObjectiveSpec(
        advantage="grpo", clip="cispo", clip_low=1.0, clip_high=4.0, denominator="all"
    ),
    "sapo": ObjectiveSpec(
        advantage="grpo", clip="sapo", aggregation="sequence_mean", denominator="all"
    ),
    "dppo": ObjectiveSpec(
        advantage="grpo",
        clip="cispo",
        clip_low=1.0,
        clip_high=19.0,
        mask="probability",
        denominator="all",
    ),
    "ppo_critic": ObjectiveSpec(
        advantage="gae", gae_lambda=0.95, kl_in="reward", kl_estimator="k1", denominator="all"
    ),
    "opd": ObjectiveSpec(
        advantage="teacher",
        clip="none",
        mask="probability",
        kl_coef=1.0,
        kl_in="reward",
        kl_estimator="k1",
        denominator="all",
    ),
}
