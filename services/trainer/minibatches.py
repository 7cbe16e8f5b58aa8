"""Which samples of a batch each optimizer update is made of."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def minibatches(samples: Tensor, count: int, epochs: int, seed: str) -> list[Tensor]:
    """`epochs` passes over `samples` (int64 indices), each cut into `count` parts.

    A part takes every n-th sample. In the first pass samples are in the order of the batch, so that
    all parts have some of every group; later passes are shuffled. The order follows from `seed`
    and the pass alone: all ranks, and a trainer that starts again, find the same.
    """
    parts: list[Tensor] = []
    for epoch in range(epochs):
        order = list(range(len(samples)))
        if epoch:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        shuffled = samples[torch.tensor(order, dtype=torch.int64)]
        parts += [shuffled[number::count] for number in range(count)]
    return parts
