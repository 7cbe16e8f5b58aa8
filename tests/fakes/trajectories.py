"""Samples as the buffer hands them out, and trajectories as generators submit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from umbra.proto.records import Task, Trajectory, VersionSpan, pack_float32, pack_int32


def sample(row: dict[str, Any], **changes: Any) -> Task:
    """The first attempt at a sample of the prompt `row`, with `changes` of its fields."""
    values: dict[str, Any] = {
        "sample_id": "s", "group_id": "g", "prompt_id": "p", "attempt": 1, "lease_s": 30.0,
    }  # fmt: skip
    return Task(row=row, **{**values, **changes})


def trajectory(
    prompt: Sequence[int] = (1, 2),
    response: Sequence[int] = (3, 4, 5),
    logprobs: Sequence[float] | None = None,
    *,
    version: int = 0,
    **changes: Any,
) -> Trajectory:
    """A complete trajectory for `sample`; all its tokens are of one version.

    Args:
        prompt: token ids.
        response: token ids, all sampled by the model.
        logprobs: one for each token of the response; -0.5 each unless given.
        version: of the weights that sampled the response.
        changes: other values of its fields.
    """
    tokens = len(response)
    values: dict[str, Any] = {
        "sample_id": "s", "group_id": "g", "prompt_id": "p", "attempt": 1,
        "prompt_ids": pack_int32(prompt), "response_ids": pack_int32(response),
        "loss_mask": b"\1" * tokens,
        "logprobs": pack_float32([-0.5] * tokens if logprobs is None else logprobs),
        "spans": [VersionSpan(version=version, start=0, end=tokens)],
        "finish_reason": "stop",
    }  # fmt: skip
    return Trajectory(**{**values, **changes})
