"""The proximal policy p, approximated without a forward pass."""

from __future__ import annotations

from torch import Tensor


def interpolated(logprobs: Tensor, behaviour: Tensor, versions: Tensor, version: int) -> Tensor:
    """log mu + alpha (log pi - log mu), with alpha = (v_p - v_b) / (v - v_b); no gradient.

    AReaL's log-linear approximation: v_b is the version that sampled the token, v_p that of the
    weights which the batch found (`version`), v = v_p + 1 the one that is being made. A token of
    the newest version has p = mu.

    Args:
        logprobs: log pi [N].
        behaviour: log mu [N].
        versions: v_b, int64 [N].
        version: v_p.
    """
    age = (version - versions).to(logprobs)
    return behaviour + age / (age + 1) * (logprobs.detach() - behaviour)
