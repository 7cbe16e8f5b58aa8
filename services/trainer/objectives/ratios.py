"""Probability ratios of tokens and of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp of more overflows half precision and means nothing any more


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which of N tokens belong together. A sequence is whole or not there at all."""

    owner: Tensor  # int64 [N], in 0 .. count - 1
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each sequence's tokens, at every token of it: [N] to [N]."""
        return values.new_zeros(self.count).index_add(0, self.owner, values)[self.owner]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each sequence's tokens, at every token of it: [N] to [N]."""
        return self.sum(values) / self.sum(torch.ones_like(values))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the exponent clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """exp(logprobs - anchor) of each token [N]."""
    return bounded_exp(logprobs - anchor)


def sequence_ratio(logprobs: Tensor, anchor: Tensor, sequences: Sequences) -> Tensor:
    """s = exp(mean over the sequence's tokens of (logprobs - anchor)), at every token [N].

    GSPO, arXiv 2507.18071, eq. 7. The gradient reaches all tokens of the sequence alike.
    """
    return bounded_exp(sequences.mean(logprobs - anchor))
