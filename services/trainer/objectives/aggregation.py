"""From losses of tokens to one number, by counts of the whole update.

So the sum over micro-batches, or over ranks, does not depend on how the update was cut up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.modeling.micro_batch import Tokens


@dataclass(frozen=True, slots=True)
class Counts:
    """What the means of an update divide by; a share of the batch where it has several updates."""

    tokens: float
    sequences: float
    samples: float  # all of them, whatever the means count


def count(
    denominator: str, own: Tensor, part: Tensor, updates: int, weight: Tensor | None = None
) -> Counts:
    """Count for the update that trains the sequences `part`, one of `updates` of this batch.

    Args:
        denominator: "trained": the means count `part`; "all": all samples of the batch, those
            without advantage included, as the published objectives do.
        own: learned tokens of each sequence of the batch, int64 [S].
        part: sequences that are trained in this update, int64 indices.
        updates: of the batch.
        weight: float64 [S], what each sequence counts, tokens and all; None: all are samples.
    """
    if weight is None:
        weight = torch.ones(len(own), dtype=torch.float64)
    samples, tokens = float(weight.sum()) / updates, own * weight
    if denominator == "all":
        return Counts(float(tokens.sum()) / updates, samples, samples)
    return Counts(float(tokens[part].sum()), float(weight[part].sum()), samples)


def token_weights(
    aggregation: str,
    tokens: Tokens,
    sequences: Tensor,
    counts: Counts,
    length: int,
    weight: Tensor | None = None,
) -> Tensor:
    """What each learned token's loss is multiplied with before all are summed, float32 [M].

    `sequences` (int64) are those trained in this update; tokens of others get 0. All is multiplied
    with the `weight` of the token's sequence, as of `count`.

        token_mean     1 / tokens                          (DAPO, arXiv 2503.14476, eq. 8)
        sequence_mean  1 / (sequences * own tokens)        (GRPO, arXiv 2402.03300, eq. 3)
        sequence_sum   1 / sequences                       (REINFORCE over whole responses)
        constant       1 / (samples * length)              (Dr. GRPO, arXiv 2503.20783)
        token_sum      1
    """
    chosen = torch.zeros(len(tokens.lengths), dtype=torch.bool)
    chosen[sequences] = True
    trained = chosen[tokens.owner]
    match aggregation:
        case "token_mean":
            divisor: Tensor | float = max(counts.tokens, 1.0)
        case "sequence_mean":
            own = torch.bincount(tokens.owner, minlength=len(tokens.lengths))
            divisor = (counts.sequences * own[tokens.owner]).clamp(min=1)
        case "sequence_sum":
            divisor = max(counts.sequences, 1.0)
        case "constant":
            divisor = counts.samples * length
        case "token_sum":
            divisor = 1.0
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")
    found = (trained / divisor).float()
    return found if weight is None else found * weight.float()[tokens.owner]
