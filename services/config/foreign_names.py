"""The staleness and objective knobs of other systems, in our terms.

Symbols as in `docs/staleness.md`: A = run_ahead, K = max_staleness. A name whose rule is one of
ours is taken in section `[buffer]` and translated; the others are refused with a sentence that says
what to write.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from umbra.proto.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A knob of another system. `ours` turns its value into keys of `[buffer]`."""

    system: str
    meaning: str  # in our terms
    ours: Callable[[int], dict[str, int]] | None = None  # None: there is no one translation
    least: int = 0


def _both(value: int) -> dict[str, int]:
    return {"run_ahead": value, "max_staleness": value}


FOREIGN: dict[str, ForeignName] = {
    "async_generation_ratio": ForeignName(
        "ROLL",
        "run_ahead and max_staleness: batches ahead, and groups older than so many steps go",
        _both,
    ),
    "generate_ahead_steps": ForeignName(
        "async-rl / dots.rl",
        "run_ahead = n - 1: it counts the running step, so that 2 means one step off-policy",
        lambda n: _both(n - 1),
        least=1,
    ),
    "max_head_offpolicyness": ForeignName("AReaL", "run_ahead and max_staleness (eta)", _both),
    "max_staleness_steps": ForeignName("SkyRL", "run_ahead and max_staleness", _both),
    "max_off_policy_steps": ForeignName(
        "prime-rl",
        "max_staleness; its run_ahead is fixed to 1",
        lambda n: {"max_staleness": n, "run_ahead": min(n, 1)},
    ),
    "max_trajectory_age_steps": ForeignName("NeMo RL", "run_ahead and max_staleness", _both),
    "max_policy_age": ForeignName(
        "torchforge", "max_staleness; run_ahead is yours to choose", lambda n: {"max_staleness": n}
    ),
    "off_by_n": ForeignName(
        "torchforge", "max_staleness; run_ahead is yours to choose", lambda n: {"max_staleness": n}
    ),
    "async_queue_size": ForeignName(
        "OpenRLHF", "run_ahead: batches that may wait", lambda n: {"run_ahead": n}
    ),
    "max_lag": ForeignName(
        "PipelineRL",
        "its lag counts samples and does not bound a sample's age: choose run_ahead = max_lag / "
        "batch (rounded up), and max_staleness as the bound",
    ),
    "staleness_threshold": ForeignName(
        "verl (fully_async)",
        "it is a share of a batch that may be stale, not an age: for 0 < share <= 1 write "
        "run_ahead = 1 and max_staleness = 1",
    ),
    "rollout_staleness_threshold": ForeignName(
        "verl", "its count begins at 1: write max_staleness = threshold - 1"
    ),
} | {
    name: ForeignName(system, f"write {ours} in [trainer]")
    for name, system, ours in (
        ("loss_type", "TRL", "objective = grpo, dr_grpo, dapo, cispo, sapo, ... or aggregation"),
        ("importance_sampling_level", "TRL", "ratio_level"),
        ("epsilon", "TRL", "clip_low and clip_high"),
        ("epsilon_high", "TRL", "clip_high (for cispo: epsilon_high - 1)"),
        ("beta", "TRL", "kl_coef"),
        ("scale_rewards", "TRL", "advantage = grpo (group) or dr_grpo (none)"),
        ("mask_truncated_completions", "TRL", "overlong_filter"),
        ("off_policy_mask_threshold", "TRL", 'mask = "opsm" and mask_threshold'),
        ("vllm_importance_sampling_clip_max", "TRL", "correction and is_cap"),
        ("adv_estimator", "verl", "advantage"),
        ("norm_adv_by_std_in_grpo", "verl", "advantage = grpo (true) or dr_grpo (false)"),
        ("loss_agg_mode", "verl", "aggregation"),
        ("clip_ratio", "verl", "clip_low and clip_high"),
        ("clip_ratio_low", "verl", "clip_low"),
        ("clip_ratio_high", "verl", "clip_high"),
        ("clip_ratio_c", "verl", "dual_clip"),
        ("kl_loss_coef", "verl", 'kl_coef and kl_in = "loss"'),
        ("kl_loss_type", "verl", "kl_estimator (low_var_kl is k3)"),
        ("kl_ctrl", "verl", 'kl_coef and kl_in = "reward"'),
        ("entropy_coeff", "verl", "entropy_coef"),
        ("rollout_is_threshold", "verl", "correction and is_cap"),
        ("rollout_rs", "verl", "mask, mask_low and mask_high"),
        ("eps_clip", "AReaL and slime", "clip_low"),
        ("eps_clip_high", "slime", "clip_high"),
        ("eps_clip_higher", "AReaL", "clip_high"),
        ("c_clip", "AReaL", "dual_clip"),
        ("use_decoupled_loss", "AReaL", 'objective = "decoupled"'),
        ("prox_logp_method", "AReaL", "proximal"),
        ("behave_imp_weight_cap", "AReaL", "is_cap (objective decoupled drops what is above)"),
        ("m2_threshold", "AReaL", 'mask = "m2po" and mask_threshold'),
        ("use_tis", "slime", 'objective = "tis"'),
        ("tis_clip", "slime", "is_cap"),
        ("init_kl_coef", "OpenRLHF", "kl_coef"),
    )
}


def translate(section: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values` of one section with the names of other systems replaced by ours.

    Raises:
        UsageError: a name that has no one translation, stands in another section than `[buffer]`,
            has a bad value, or says something else than one of our keys beside it.
    """
    result = {key: value for key, value in values.items() if key not in FOREIGN}
    for name in values.keys() & FOREIGN.keys():
        knob = FOREIGN[name]
        if knob.ours is None or section != "buffer":
            raise UsageError(f"{where}: {name} is {knob.system}'s; {_advice(knob)}")
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < knob.least:
            raise UsageError(f"{where}: buffer.{name} must be an integer >= {knob.least}")
        ours = knob.ours(value)
        for key, number in ours.items():
            if result.setdefault(key, number) != number:
                raise UsageError(
                    f"{where}: buffer.{name} = {value} ({knob.system}) means {key} = {number}, but "
                    f"buffer.{key} is {result[key]}: remove one of them"
                )
        said = " and ".join(f"buffer.{key} = {number}" for key, number in ours.items())
        log.warning("%s: %s's %s = %s is read as %s", where, knob.system, name, value, said)
    return result


def foreign_hint(name: str) -> str:
    """What to write instead of `name`, if that or nearly that is another system's; else empty."""
    close = difflib.get_close_matches(name, list(FOREIGN), n=1, cutoff=0.9)
    if not close:
        return ""
    knob = FOREIGN[close[0]]
    return f"; {close[0]} is {knob.system}'s: {_advice(knob)}"


def _advice(knob: ForeignName) -> str:
    if knob.ours is None:
        return knob.meaning
    return f"in [buffer] it means {knob.meaning}"
