"""Top-k, top-p and min-p: the tokens that sampling leaves in."""

from __future__ import annotations

import torch


def restrict(logits: torch.Tensor, settings: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """`logits` [n, V] within top-k, top-p and min-p, in this order; those left out are -inf.

    Args:
        logits: after temperature.
        settings: a row (temperature, top_k, top_p, min_p) for each, [n, 4]; the first is not read.
        greedy: rows that stay as they are, bool [n, 1].
    """
    vocabulary = logits.shape[1]
    top_k, top_p, min_p = settings[:, 1].long(), settings[:, 2], settings[:, 3]
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=logits.device)[None]
    kept = ranks < torch.where(top_k > 0, top_k, vocabulary)[:, None]
    probs = torch.softmax(ordered.masked_fill(~kept, -torch.inf), dim=-1)
    # Keep a token while the mass before it is below top_p: the first one that reaches it stays.
    kept &= (probs.cumsum(dim=-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= probs >= min_p[:, None] * probs[:, :1]
    kept |= greedy
    kept[:, 0] = True
    allowed = torch.zeros_like(kept).scatter(1, order, kept)
    return logits.masked_fill(~allowed, -torch.inf)
