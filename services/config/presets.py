"""Presets of the policy loss: each is one value for every piece.

`docs/algorithms.md` has the formulas, `services/trainer/objectives/` computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from umbra.services.config.keys import Section, key

Preset = Literal[
    "ppo", "naive", "tis", "tis_opsm", "decoupled", "icepop", "prime_rl",
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo",
    "ppo_critic", "opd",
]  # fmt: skip
Advantage = Literal[
    "dr_grpo", "grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "teacher"
]  # fmt: skip
Level = Literal["token", "sequence"]
Clip = Literal["ppo", "cispo", "none"]
BY_RATIO = ("token", "sequence", "geometric")  # masks with bounds
BY_RULE = ("opsm", "probability")  # masks with a threshold


class ObjectiveSpec(Section):
    """One value for every piece; the defaults are preset `ppo`. Those with a text are keys too."""

    advantage: Advantage = key(
        "dr_grpo",
        "reward - group mean; that over the std; reward - mean of the others; return or reward "
        "- group mean, whitened over the batch; by a value model (gae); or what a teacher says "
        "(teacher, of objective opd)",
    )
    gamma: float = key(1.0, "discount per token (reinforce_pp, gae)", ge=0, le=1)
    gae_lambda: float = key(1.0, "lambda of generalised advantage estimation", ge=0, le=1)
    overlong_buffer: int = key(
        0, "last tokens before a turn's max_tokens that cost reward (DAPO); 0 = none", ge=0
    )
    overlong_filter: bool = key(False, "leave out what was cut off at the token limit (DAPO)")
    ratio_level: Level = "token"
    anchor: Literal["behaviour", "proximal"] = key(
        "behaviour",
        "denominator of the ratio: the policy that sampled, or the trainer's before this batch "
        "(proximal)",
    )
    proximal: Literal["recompute", "stage"] = key(
        "recompute", "logprobs of the proximal policy: a forward pass, or the scoring stage logp"
    )
    clip: Clip = "ppo"
    clip_low: float = key(0.2, "ratio clip below: 1 - clip_low", gt=0)
    clip_high: float = key(0.2, "ratio clip above: 1 + clip_high", gt=0)
    dual_clip: float = key(0.0, "bound of the ratio at negative advantages, > 1; 0 = off", ge=0)
    correction: Literal["none", "truncate", "mask"] = key(
        "none", "weight proximal / behaviour: none, truncated to is_floor..is_cap, or 0 outside"
    )
    is_level: Level = key("token", "that weight per token, or the product of a sequence")
    is_floor: float = key(0.0, "least such weight; 0 = none", ge=0)
    is_cap: float = key(2.0, "largest such weight; 0 = none", ge=0)
    mask: Literal["none", "token", "sequence", "geometric", "opsm", "probability"] = key(
        "none",
        "masked out: tokens, sequences by product or by geometric mean with proximal / "
        "behaviour outside mask_low..mask_high; or by a rule with mask_threshold",
    )
    mask_low: float = key(0.5, "least ratio that is kept", ge=0)
    mask_high: float = key(2.0, "largest ratio that is kept", gt=0)
    mask_threshold: float = key(
        0.2,
        "opsm: mean log ratio of a sequence; probability: change of a token's probability",
        gt=0,
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = key(
        "token_mean",
        "of the token losses: mean over tokens, mean over sequences of their means or sums, or sum "
        "over the longest turn's tokens",
    )
    denominator: Literal["trained", "all"] = key(
        "trained", "samples that a mean counts: those with an advantage, or all"
    )
    kl_coef: float = key(0.0, "weight of the KL term; 0 = off", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = key("k3", "estimate of the KL per token")
    kl_to: Literal["reference", "behaviour"] = key(
        "reference", "KL to the reference model, or to what sampled"
    )
    kl_in: Literal["loss", "reward"] = "loss"
    kl_unbiased: bool = key(False, "multiply the KL by pi / mu of the token (DeepSeek-V3.2)")
    entropy_coef: float = key(0.0, "weight of the entropy bonus; 0 = off", ge=0)

    @property
    def uses_proximal(self) -> bool:
        return self.anchor == "proximal" or self.correction != "none" or self.mask in BY_RATIO

    @property
    def weighs_exactly(self) -> bool:
        """True if a token's gradient has the weight pi / mu, without a bound."""
        if self.anchor == "behaviour":
            return self.clip in ("ppo", "none") and self.correction == "none"
        exact = self.correction != "none" and self.is_level == "token"
        return exact and not (self.is_floor or self.is_cap)

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def regularised(self) -> bool:
        """True if a sample without advantage has a gradient nevertheless."""
        return self.entropy_coef > 0 or (self.kl_coef > 0 and self.kl_in == "loss")

    @property
    def by_sequence(self) -> bool:
        """True if a ratio or a mask is of a whole response."""
        return (
            self.ratio_level == "sequence"
            or (self.correction != "none" and self.is_level == "sequence")
            or self.mask in ("sequence", "geometric", "opsm")
        )


_decoupled = partial(ObjectiveSpec, anchor="proximal")
# Published objectives count every sample of the batch, those without advantage included.
_published = partial(ObjectiveSpec, denominator="all")
_grpo = partial(_published, advantage="grpo")
_kl_reward = partial(_published, kl_in="reward", kl_estimator="k1")
_small_steps: dict[str, Any] = {"mask": "probability", "mask_threshold": 0.2}

PRESETS: dict[Preset, ObjectiveSpec] = {
    "ppo": ObjectiveSpec(),
    "naive": _decoupled(),
    "tis": _decoupled(correction="truncate"),
    "tis_opsm": _decoupled(correction="truncate", mask="opsm"),
    "decoupled": _decoupled(correction="mask"),
    "icepop": _decoupled(correction="mask", is_floor=0.5, is_cap=5.0),
    "prime_rl": _published(
        clip="none", kl_to="behaviour", kl_estimator="k2", kl_coef=2e-3, **_small_steps
    ),
    "grpo": _grpo(aggregation="sequence_mean"),
    "dr_grpo": _published(aggregation="constant"),
    "dapo": _grpo(clip_high=0.28),
    "rloo": _published(advantage="rloo", aggregation="sequence_sum"),
    "reinforce_pp": _kl_reward(advantage="reinforce_pp"),
    "reinforce_pp_baseline": _published(advantage="reinforce_pp_baseline", kl_estimator="k2"),
    "gspo": _grpo(
        ratio_level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"
    ),
    "cispo": _grpo(clip="cispo", clip_low=1.0, clip_high=4.0),
    "ppo_critic": _kl_reward(advantage="gae", gae_lambda=0.95),
    "opd": _kl_reward(advantage="teacher", clip="none", kl_coef=1.0, **_small_steps),
}


# Which pieces are read under which circumstances; the others always are.
Condition = tuple[str, Callable[[ObjectiveSpec], bool]]
_CLIPS: Condition = ("clip ppo or cispo", lambda p: p.clip in ("ppo", "cispo"))
_CORRECTION: Condition = ("a correction", lambda p: p.correction != "none")
_BOUNDS: Condition = ("mask token, sequence or geometric", lambda p: p.mask in BY_RATIO)
_KL: Condition = ("kl_coef", lambda p: p.kl_coef > 0)
CONDITIONS: dict[str, Condition] = {
    "gamma": ("advantage reinforce_pp or gae", lambda p: p.advantage in ("reinforce_pp", "gae")),
    "gae_lambda": ("advantage gae", lambda p: p.advantage == "gae"),
    "proximal": ("anchor proximal, a correction or a mask by ratio", lambda p: p.uses_proximal),
    "dual_clip": ("clip ppo", lambda p: p.clip == "ppo"),
    "mask_threshold": ("mask opsm or probability", lambda p: p.mask in BY_RULE),
    "denominator": (
        "aggregation token_mean, sequence_mean or sequence_sum",
        lambda p: p.aggregation != "constant",
    ),
    **dict.fromkeys(("clip_low", "clip_high"), _CLIPS),
    **dict.fromkeys(("is_level", "is_floor", "is_cap"), _CORRECTION),
    **dict.fromkeys(("mask_low", "mask_high"), _BOUNDS),
    **dict.fromkeys(("kl_to", "kl_estimator", "kl_unbiased"), _KL),
}

# Each piece with a text as a key, which is None where the preset chooses.
_KEYS = {
    name: Annotated[kind | None, get_args(kind)[-1]]
    for name, kind in get_type_hints(ObjectiveSpec, include_extras=True).items()
    if get_origin(kind) is Annotated
}


class ObjectiveKeys(Section):
    """The preset and the keys that change one of its pieces; None leaves it as in the preset."""

    objective: Preset = key("tis_opsm", "preset of the policy loss; keys below change its pieces")
    __annotations__ |= _KEYS
    locals().update(dict.fromkeys(_KEYS))
    score_centering: int = key(
        0,
        "number of the sampler's likeliest tokens by which scores are centered (arXiv 2609.20807); "
        "generators send them with each token; 0 = off, 128 in the paper",
        ge=0,
        le=1024,
    )

    @property
    def chosen(self) -> dict[str, object]:
        values = {name: getattr(self, name, None) for name in ObjectiveSpec.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def pieces(self) -> ObjectiveSpec:
        return msgspec.structs.replace(PRESETS[self.objective], **self.chosen)

    def objective_faults(self) -> Iterator[str]:
        pieces, objective = self.pieces, self.objective
        for key_, (needs, applies) in CONDITIONS.items():
            if key_ in self.chosen and not applies(pieces):
                yield f"trainer.{key_} does nothing with objective {objective}: it needs {needs}"
        if pieces.anchor == "behaviour" and pieces.correction != "none":
            yield (
                f"trainer.correction = {pieces.correction} corrects for the behaviour policy a "
                "second time: set trainer.anchor to proximal, or the correction to none"
            )
        if self.score_centering and pieces.ratio_level == "sequence":
            yield (
                "trainer.score_centering centers the scores of tokens, and objective "
                f"{objective} has one ratio for a response: set it to 0, or choose another"
            )
        elif self.score_centering and pieces.weighs_exactly:
            yield (
                f"trainer.score_centering does nothing with objective {objective}, whose weight "
                "pi / mu leaves no drift: set it to 0, or choose tis, icepop, cispo or naive"
            )
        for applies, low, high in (
            (pieces.correction != "none" and pieces.is_cap, "is_floor", "is_cap"),
            (pieces.mask in BY_RATIO, "mask_low", "mask_high"),
        ):
            least, most = getattr(pieces, low), getattr(pieces, high)
            if applies and least >= most:
                yield f"trainer.{low} = {least:g} must be less than trainer.{high} = {most:g}"
        most = 1 + pieces.clip_high
        if pieces.dual_clip and pieces.dual_clip <= most:
            key_ = f"trainer.dual_clip = {pieces.dual_clip:g}"
            yield f"{key_} must be more than 1 + clip_high = {most:g}"
        if pieces.advantage == "teacher" and not (pieces.kl_coef and pieces.kl_in == "reward"):
            yield "trainer.advantage = teacher needs trainer.objective = opd and kl_coef above 0"
        if not pieces.kl_coef or pieces.kl_in == "loss":
            return
        if pieces.kl_to == "behaviour":
            yield (
                f"trainer.kl_to = behaviour with objective {objective}, whose KL is in the reward, "
                "compares the policy that sampled with itself: set it to reference"
            )
        if pieces.kl_unbiased:
            yield (
                "trainer.kl_unbiased changes the gradient of a KL in the loss, and objective "
                f"{objective} has it in the reward: leave it out"
            )
