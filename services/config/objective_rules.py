"""Objectives that cannot work, and keys that would do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from umbra.services.config import CriticConfig, RunConfig
from umbra.services.config.presets import ObjectiveSpec

BY_RATIO = ("token", "sequence", "geometric")  # masks with bounds
BY_RULE = ("m2po", "opsm", "probability")  # masks with a threshold

# Which pieces are read under which circumstances; the others always are.
READ: dict[str, tuple[str, Callable[[ObjectiveSpec], bool]]] = {
    "gamma": ("advantage reinforce_pp or gae", lambda p: p.advantage in ("reinforce_pp", "gae")),
    "gae_lambda": ("advantage gae", lambda p: p.advantage == "gae"),
    "proximal": ("anchor proximal, a correction or a mask by ratio", lambda p: p.uses_proximal),
    "clip_low": ("clip ppo or cispo", lambda p: p.clip in ("ppo", "cispo")),
    "clip_high": ("clip ppo or cispo", lambda p: p.clip in ("ppo", "cispo")),
    "dual_clip": ("clip ppo", lambda p: p.clip == "ppo"),
    "is_level": ("a correction", lambda p: p.correction != "none"),
    "is_floor": ("a correction", lambda p: p.correction != "none"),
    "is_cap": ("a correction", lambda p: p.correction != "none"),
    "mask_low": ("mask token, sequence or geometric", lambda p: p.mask in BY_RATIO),
    "mask_high": ("mask token, sequence or geometric", lambda p: p.mask in BY_RATIO),
    "mask_threshold": ("mask m2po, opsm or probability", lambda p: p.mask in BY_RULE),
    "denominator": (
        "aggregation token_mean, sequence_mean or sequence_sum",
        lambda p: p.aggregation not in ("constant", "token_sum"),
    ),
    "kl_to": ("kl_coef", lambda p: p.kl_coef > 0),
    "kl_estimator": ("kl_coef", lambda p: p.kl_coef > 0),
    "kl_unbiased": ("kl_coef", lambda p: p.kl_coef > 0),
}


def implied(config: RunConfig) -> dict[str, object]:
    """The pieces that the preset chooses (no key does), of those that are read."""
    pieces, chosen = config.trainer.pieces, config.trainer.chosen
    values = {name: getattr(pieces, name) for name in ObjectiveSpec.__struct_fields__}
    return {
        name: value
        for name, value in values.items()
        if name not in chosen and (name not in READ or READ[name][1](pieces))
    }


def lone_groups(config: RunConfig) -> str:
    """What to know of groups of one sample; empty if nothing, and for rloo, which refuses them."""
    advantage = config.trainer.pieces.advantage
    if config.buffer.group_size > 1 or advantage in ("rloo", "reinforce_pp", "gae"):
        return ""
    return (
        f"buffer.group_size = 1 leaves trainer.advantage = {advantage} nothing to compare a sample "
        "with, so that its advantage is its reward: set buffer.group_size to 2 or more, or "
        "trainer.advantage to reinforce_pp"
    )


def objective_faults(config: RunConfig) -> Iterator[str]:
    """One sentence for each thing that cannot work, with the keys to change."""
    pieces = config.trainer.pieces
    yield from _unread(config)
    yield from _sources(config, pieces)
    yield from _corrections(pieces)
    yield from _kl(config)
    if pieces.advantage != "gae" and config.critic != CriticConfig():
        yield (
            f"[critic] is for trainer.advantage = gae, and it is {pieces.advantage}: set "
            "trainer.objective = ppo_critic, or leave [critic] out"
        )
    if pieces.advantage == "rloo" and config.buffer.group_size < 2:
        yield (
            "trainer.advantage = rloo compares with the others of a group: set buffer.group_size "
            "to 2 or more"
        )
    if pieces.dual_clip and pieces.dual_clip <= 1 + pieces.clip_high:
        yield (
            f"trainer.dual_clip = {pieces.dual_clip:g} must be more than 1 + clip_high = "
            f"{1 + pieces.clip_high:g}"
        )
    limit = config.longest_turn
    turns = {config.sampling_for(one).max_tokens for one in config.all_environments}
    if pieces.overlong_buffer and len(turns) > 1:
        yield (
            f"trainer.overlong_buffer = {pieces.overlong_buffer} counts from the end of the "
            "longest response, which is another one in each of [[environments]] (sampling."
            f"max_tokens of {', '.join(map(str, sorted(turns)))}): make them equal, or set it to 0"
        )
    if pieces.overlong_buffer > limit:
        yield (
            f"trainer.overlong_buffer = {pieces.overlong_buffer} is more than the longest response "
            f"({limit} tokens: sampling.max_tokens)"
        )


def _unread(config: RunConfig) -> Iterator[str]:
    pieces = config.trainer.pieces
    for key in config.trainer.chosen:
        needs, read = READ.get(key, ("", lambda _: True))
        if not read(pieces):
            yield (
                f"trainer.{key} does nothing with objective {config.trainer.objective}: it needs "
                f"{needs}"
            )


def _sources(config: RunConfig, pieces: ObjectiveSpec) -> Iterator[str]:
    """Logprobs that somebody has to compute."""
    stages = config.buffer.stages
    if pieces.kl_coef and pieces.kl_to == "reference" and "ref_logp" not in stages:
        yield (
            f"trainer.kl_coef = {pieces.kl_coef:g} needs logprobs of the reference model: add "
            "ref_logp to buffer.stages"
        )
    if pieces.uses_proximal and pieces.proximal == "stage" and "logp" not in stages:
        yield (
            "trainer.proximal = stage needs the logprobs of that stage: add logp to buffer.stages, "
            "or set trainer.proximal to recompute"
        )
    if pieces.mask == "m2po" and pieces.proximal == "interpolate":
        yield (
            "trainer.mask = m2po looks at the whole batch before it is trained on, where nothing "
            "can be interpolated yet: set trainer.proximal to recompute or stage"
        )


def _corrections(pieces: ObjectiveSpec) -> Iterator[str]:
    if pieces.anchor == "behaviour" and pieces.correction != "none":
        yield (
            f"trainer.correction = {pieces.correction} corrects for the behaviour policy a second "
            "time, which is in the ratio already: set trainer.anchor to proximal, or the "
            "correction to none"
        )
    if pieces.correction != "none" and 0 < pieces.is_cap <= pieces.is_floor:
        yield (
            f"trainer.is_floor = {pieces.is_floor:g} must be less than trainer.is_cap = "
            f"{pieces.is_cap:g}"
        )
    if pieces.mask in BY_RATIO and pieces.mask_low >= pieces.mask_high:
        yield (
            f"trainer.mask_low = {pieces.mask_low:g} must be less than trainer.mask_high = "
            f"{pieces.mask_high:g}"
        )


def _kl(config: RunConfig) -> Iterator[str]:
    pieces, objective = config.trainer.pieces, config.trainer.objective
    if not pieces.kl_coef or pieces.kl_in == "loss":
        return
    if pieces.kl_to == "behaviour":
        yield (
            f"trainer.kl_to = behaviour with objective {objective}, whose KL is in the reward, "
            "compares the policy that sampled with itself: set it to reference"
        )
    if pieces.kl_unbiased or pieces.kl_estimator == "k3_plus":
        which = "kl_unbiased" if pieces.kl_unbiased else "kl_estimator = k3_plus"
        yield (
            f"trainer.{which} changes the gradient of a KL in the loss, and objective {objective} "
            "has it in the reward: leave it out"
        )
