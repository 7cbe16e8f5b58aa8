"""What a sample earned, as the objective sees it: length penalties and the KL in the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec
from umbra.services.trainer.advantages import Rewarded
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.objectives.kl import ESTIMATORS


def rewarded(
    batch: TrainBatch,
    pieces: ObjectiveSpec,
    limit: int,
    reference: Tensor | None,
    values: Tensor | None,
) -> Rewarded:
    """The rewards of `batch` with the penalties that `pieces` ask for.

    Args:
        batch: S samples with M learned tokens.
        pieces: overlong and KL settings are read.
        limit: tokens of the longest response.
        reference: log of the reference policy [M], needed for a KL to it in the reward.
        values: of a value model [M].
    """
    rewards, owner = batch.rewards, batch.sample[batch.tokens.owner]
    if pieces.overlong_buffer:
        own = torch.bincount(owner, minlength=len(rewards))
        rewards = rewards + overlong(own, limit, pieces.overlong_buffer, pieces.overlong_factor)
    penalties = None
    if pieces.kl_coef and pieces.kl_in == "reward":
        assert reference is not None
        # Of the policy that sampled: its logprobs are exact and always there.
        estimate = ESTIMATORS[pieces.kl_estimator](batch.behaviour, reference)
        penalties = pieces.kl_coef * estimate.double()
    return Rewarded(rewards, batch.groups, owner, penalties, values)


def overlong(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """min(-(len - (limit - buffer)) / buffer * factor, 0) of each sample, float64 [S].

    DAPO's soft overlong punishment (arXiv 2503.14476), in verl's form: nothing until `buffer`
    tokens before `limit`, then linearly down to -factor at `limit`.
    """
    exceeding = lengths.double() - (limit - buffer)
    return (-exceeding / buffer * factor).clamp(max=0.0)
