"""Floating-point operations of an update, and the most that a device can do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from umbra.services.modeling.packing import MicroBatch

MATRIX = 8192  # rows of the product that gives the ceiling
TRIES = 12


@dataclass(frozen=True, slots=True)
class Operations:
    """What a token costs in a model.

    Counted are 6 operations per weight and token (2 forward, 4 backward; the output layer: per
    learned token), and 12 per head dimension, head, layer and pair of a token and one that it
    attends to: 6 L^2 for a sequence of L tokens. Kaplan et al. 2020, arXiv 2001.08361, section 2.1.
    """

    body: int  # weights of the layers
    head: int  # of the output layer
    attention: int  # heads * head dimension * layers

    @classmethod
    def of(cls, model: PreTrainedModel) -> Operations:
        """Those of `model`, which may be sharded."""
        config: Any = model.config
        head = config.vocab_size * config.hidden_size
        body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
        if not config.tie_word_embeddings:
            body -= head
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        attention = config.num_attention_heads * width * config.num_hidden_layers
        return cls(body, head, attention)

    def update(self, micro: MicroBatch) -> float:
        """Of a forward and a backward pass over `micro`: what it feeds, padding left out."""
        seen = micro.position_ids.double() + 1  # keys that a token attends to
        if micro.segment is not None:
            keys = float(seen[micro.segment >= 0].sum())
        else:
            keys = float(seen.mean()) * micro.tokens
        learned = len(micro.targets)
        return 6 * self.body * micro.tokens + 6 * self.head * learned + 12 * self.attention * keys


def ceiling(device: torch.device) -> float:
    """Operations per second of a bf16 product of two large square matrices, the best of a few."""
    a = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(TRIES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    del a
    torch.cuda.empty_cache()  # the model needs the room
    return 2 * MATRIX**3 / best
