"""Rows and passes of `auto` for a trainer: by what training a token keeps."""

from __future__ import annotations

from typing import Any

import torch

from umbra.services.config import TrainerConfig
from umbra.services.modeling.row_sizes import (
    RowSizes,
    layer_numbers,
    memory_of,
    room_for_tokens,
    rows_within,
)
from umbra.services.trainer.ranks import Ranks

WEIGHT_BYTES = 16  # of a weight in float32, its gradient and two moments


def row_sizes(
    config: TrainerConfig, model: Any, device: torch.device, ranks: Ranks, max_tokens: int = 0
) -> RowSizes:
    """The configured numbers; for `auto` what suits the model, the memory and the samples.

    A pass has what fits, by `activation_bytes`, into half of the memory that weights leave, and
    rows are those of `rows_within`. All ranks get the same: that of the one with the least memory.

    Args:
        config: the two keys, and what memory depends on.
        model: its config and its number of weights are read; it may be sharded.
        device: where it computes.
        ranks: who shares the weights, and on a CPU the memory.
        max_tokens: as for `rows_within`.
    """
    fits = torch.zeros(1, dtype=torch.int64)
    if config.micro_tokens == "auto":
        memory, kind = memory_of(device, ranks.hosts.place.per_host), device.type
        weights = sum(parameter.numel() for parameter in model.parameters())
        fits[0] = fitting_tokens(config, model.config, weights // ranks.holders, memory, kind)
        fits = ranks.gather(fits).min()
    return rows_within(config, int(fits), device.type, max_tokens)


def activation_bytes(config: TrainerConfig, model: Any, kind: str = "cpu") -> int:
    """Of a token, kept for the backward pass: the tensors of all layers (`layer_numbers`).

    Of layers that are computed again: their input, and all of one. `selective` counts as none of
    them, which is more than it keeps. `model` is its Transformers config; `kind` the device's,
    which `auto` keys depend on.
    """
    known = model.get_text_config()
    hidden, layers = known.hidden_size, known.num_hidden_layers
    layer = layer_numbers(model)
    chosen = config.recomputes_on(kind)
    every = 1 if chosen is True else int(str(chosen).split()[1]) if "every" in str(chosen) else 0
    again = layers // every if every else 0
    kept = hidden * again + layer * (layers - again + bool(again))
    return kept * (4 if config.precision_on(kind) == "no" else 2)


def fitting_tokens(config: TrainerConfig, model: Any, weights: int, memory: int, kind: str) -> int:
    """Tokens whose activations fit beside the weights; 0 if the weights alone do not.

    Args:
        model: its Transformers config.
        weights: that a rank holds.
        memory: bytes that it has in all.
        kind: of its device, "cpu" or "cuda".
    """
    room = room_for_tokens(memory, WEIGHT_BYTES * weights, config)
    return room // activation_bytes(config, model, kind)
