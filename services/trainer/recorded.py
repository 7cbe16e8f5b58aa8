"""What trajectories say of their learned tokens beyond the behaviour logprobs, [M] each."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from umbra.services.trainer.batch import BatchError, TrainBatch

STAGES = {"ref_logprobs": "ref_logp", "proximal_logprobs": "logp"}


def recorded_logprobs(
    batch: TrainBatch, field: Literal["ref_logprobs", "proximal_logprobs"]
) -> Tensor:
    """Logprobs that a scoring stage found, float32 [M].

    Raises:
        BatchError: a sample has none; it names the sample.
    """
    parts: list[np.ndarray] = []
    for trajectory in batch.trajectories:
        data: bytes | None = getattr(trajectory, field)
        mask = np.frombuffer(trajectory.loss_mask, "u1").astype(bool)
        if data is None:
            raise BatchError(
                f"sample {trajectory.sample_id} has no {field}, which the objective needs: "
                f"put {STAGES[field]} into buffer.stages"
            )
        parts.append(np.frombuffer(data, "<f4")[mask])
    return torch.from_numpy(np.concatenate(parts))


def token_versions(batch: TrainBatch) -> Tensor:
    """The policy version that sampled each token, int64 [M]."""
    parts: list[np.ndarray] = []
    for trajectory in batch.trajectories:
        mask = np.frombuffer(trajectory.loss_mask, "u1").astype(bool)
        lengths = [span.end - span.start for span in trajectory.spans]
        parts.append(np.repeat([span.version for span in trajectory.spans], lengths)[mask])
    return torch.from_numpy(np.concatenate(parts))
