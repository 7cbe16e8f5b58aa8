"""From losses of tokens to one number, by counts of the whole update.

So the sum over micro-batches, or over ranks, does not depend on how the update was cut up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.config.presets import ObjectiveSpec


def token_weights(
    pieces: ObjectiveSpec,
    owner: Tensor,
    own: Tensor,
    part: Tensor,
    updates: int,
    length: int,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the weight of each learned token's loss in the sum, float32 [M].

        token_mean     1 / tokens                          (DAPO, arXiv 2503.14476, eq. 8)
        sequence_mean  1 / (sequences * own tokens)        (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum   1 / sequences                       (REINFORCE over whole responses)
        constant       1 / (samples * length)              (Dr. GRPO, arXiv 2503.20783)
        token_sum      1

    Means count the sequences that are trained, or with denominator "all" all of the batch, those
    without advantage included, as the published objectives do: a share of them for each update.

    Args:
        owner: int64 [M], the sequence of each learned token.
        own: int64 [S], learned tokens of each sequence of the batch.
        part: int64, the sequences that are trained in this update; tokens of others get 0.
        updates: of the batch.
        length: of the longest response.
        weight: float64 [S], what each sequence counts, tokens and all; None: all are samples.
    """
    if weight is None:
        weight = torch.ones(len(own), dtype=torch.float64)
    samples, counted = float(weight.sum()) / updates, own * weight
    tokens, sequences = float(counted[part].sum()), float(weight[part].sum())
    if pieces.denominator == "all":
        tokens, sequences = float(counted.sum()) / updates, samples
    divisor: Tensor | float
    match pieces.aggregation:
        case "token_mean":
            divisor = max(tokens, 1.0)
        case "sequence_mean":
            divisor = (sequences * own[owner]).clamp(min=1)
        case "sequence_sum":
            divisor = max(sequences, 1.0)
        case "constant":
            divisor = samples * length
        case "token_sum":
            divisor = 1.0
    trained = torch.zeros(len(own), dtype=torch.bool)
    trained[part] = True
    return (trained[owner] / divisor).float() * weight.float()[owner]
