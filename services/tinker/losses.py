"""The losses of the Tinker API: sums over the tokens of each datum, by what the client sends.

Formulas and defaults are from its documentation. p is the policy's logprob of a target token,
q the one it was sampled with, A its advantage, w its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.tinker.wire import Array, Datum

_RL = ("logprobs", "advantages")
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": _RL,
    "ppo": _RL,
    "cispo": _RL,
    "dro": _RL,
}
# Settings and their defaults; None: it has to be given.
_SETTINGS: dict[str, dict[str, float | None]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": None},
}


def settings_of(loss_fn: str, given: Mapping[str, float]) -> dict[str, float]:
    """Return the settings of a loss; UsageError if the loss or a setting is not supported."""
    if loss_fn not in INPUTS:
        raise UsageError(f"loss_fn {loss_fn!r} is not supported: use one of {', '.join(INPUTS)}")
    known = _SETTINGS.get(loss_fn, {})
    found = {**known, **given}
    for key, value in found.items():
        if key not in known:
            raise UsageError(f"loss_fn_config[{key!r}] is no setting of {loss_fn}")
        if value is None or not math.isfinite(value) or value < 0:
            raise UsageError(f"loss_fn_config[{key!r}] of {loss_fn} has to be a number >= 0")
    return {key: value for key, value in found.items() if value is not None}


def check_datum(datum: Datum, loss_fn: str, longest: int, vocabulary: int) -> None:
    """Raise UsageError unless `datum` has what `loss_fn` needs, and nothing else."""
    count, needed = len(datum.tokens), INPUTS[loss_fn]
    if not 0 < count <= longest:
        raise UsageError(f"model_input has {count} tokens; the server takes 1 to {longest}")
    for name in ("target_tokens", *needed):
        if name not in datum.inputs:
            raise UsageError(f"{loss_fn} needs loss_fn_inputs[{name!r}]")
    if more := datum.inputs.keys() - {"target_tokens", *needed}:
        raise UsageError(f"{loss_fn} does not use loss_fn_inputs {sorted(more)}: leave them out")
    targets = datum.inputs["target_tokens"]
    ranks = (1, 2) if loss_fn == "cross_entropy" else (1,)
    if targets.ndim not in ranks or targets.dtype.kind != "i" or not targets.size:
        raise UsageError(f"target_tokens of {loss_fn} have the shape {list(targets.shape)}")
    for name, values in datum.inputs.items():
        if len(values) != count or values.shape != targets.shape:
            raise UsageError(
                f"loss_fn_inputs[{name!r}] has the shape {list(values.shape)}, target_tokens "
                f"{list(targets.shape)}, and model_input {count} tokens"
            )
        if values.dtype.kind == "f" and not bool((abs(values) < math.inf).all()):
            raise UsageError(f"loss_fn_inputs[{name!r}] has a number that is not finite")
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UsageError(f"{name} has a token outside of the vocabulary of {vocabulary}")


def token_losses(
    loss_fn: str, settings: Mapping[str, float], p: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss of each token, of the shape of `p`; `inputs` are by `INPUTS`."""
    if loss_fn == "cross_entropy":
        return -p * inputs["weights"]
    advantages = inputs["advantages"]
    log_ratio = p - inputs["logprobs"]
    ratio = log_ratio.exp()
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    if loss_fn == "dro":
        return 0.5 * settings["beta"] * log_ratio.square() - p * advantages
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    if loss_fn == "cispo":
        return -clipped.detach() * p * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)


def column(data: list[Datum], name: str) -> Tensor:
    """Return the input `name` of all data, one after the other, [M] or [M, K]."""
    parts: list[Array] = [datum.inputs[name] for datum in data]
    joined = torch.cat([torch.from_numpy(part.copy()) for part in parts])
    return joined if name == "target_tokens" else joined.float()
