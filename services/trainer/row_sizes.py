"""How long packed rows and forward passes are, where the run file leaves it to `auto`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from umbra.services.runtime.config import TrainerConfig
from umbra.services.runtime.process.host_memory import host_bytes
from umbra.services.trainer.ranks import Ranks

SHORT_ROW = 256  # tokens; narrower rows save little
CPU_PASS, GPU_PASS = 4096, 65536  # tokens at most; more of them make no device faster
ACTIVATIONS = 0.5  # of the memory that weights leave: the rest is logits, scratch and fragmentation
WEIGHT_BYTES = 16  # of a weight in float32, its gradient and two moments


class RowSizes(NamedTuple):
    """`trainer.pack_tokens` and `trainer.micro_tokens` as numbers."""

    pack_tokens: int
    micro_tokens: int


def row_sizes(
    config: TrainerConfig, model: Any, device: torch.device, ranks: Ranks, max_tokens: int = 0
) -> RowSizes:
    """The configured numbers; for `auto` what suits the model, the memory and the samples.

    A pass has what fits, by `activation_bytes`, into half of the memory that weights leave, and at
    most 65,536 tokens on a GPU and 4096 on a CPU, where more make nothing faster. On a GPU a row is
    as long as a pass, as a row of many segments costs no more than many rows. On a CPU it has room
    for two of the longest responses, so that they share a prompt, for which a pass may be longer;
    it is no longer than that, as short rows have a dense mask. All ranks get the same: that of the
    one with the least memory.

    Args:
        config: the two keys, and what memory depends on.
        model: its config and its number of weights are read; it may be sharded.
        device: where it computes.
        ranks: who shares the weights, and on a CPU the memory.
        max_tokens: `sampling.max_tokens`, the longest response of a turn; 0: unknown.
    """
    fits = torch.zeros(1, dtype=torch.int64)
    if config.micro_tokens == "auto":
        memory, kind = memory_of(device, ranks.hosts.place.per_host), device.type
        weights = sum(parameter.numel() for parameter in model.parameters())
        fits[0] = fitting_tokens(config, model.config, weights // ranks.holders, memory, kind)
        fits = ranks.gather(fits).min()
    return rows_within(config, int(fits), device.type, max_tokens)


def rows_within(config: TrainerConfig, fits: int, kind: str, max_tokens: int = 0) -> RowSizes:
    """The configured numbers; for `auto` what `row_sizes` says, where so many tokens fit."""
    pack_tokens, micro_tokens = config.pack_tokens, config.micro_tokens
    gpu = kind == "cuda"
    if micro_tokens == "auto":
        most = GPU_PASS if gpu else max(CPU_PASS, 2 * max_tokens)
        micro_tokens = max(SHORT_ROW, min(fits, most))
    if pack_tokens == "auto":
        pack_tokens = micro_tokens if gpu else min(micro_tokens, max(SHORT_ROW, 2 * max_tokens))
    return RowSizes(pack_tokens, micro_tokens)


def memory_of(device: torch.device, per_host: int) -> int:
    """Bytes that a rank has in all: of its GPU, or its share of the host's or container's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes() // per_host


def activation_bytes(config: TrainerConfig, model: Any, kind: str = "cpu") -> int:
    """Of a token, kept for the backward pass: a layer's tensors, by the shapes in its config.

    Ten as wide as the hidden state (two norms, the output projections, the residual stream), three
    of each query, key and value (projected, normed or rotated, and what attention keeps), four of
    each unit of the feed-forward part that the token meets. Of layers that are computed again:
    their input, and all of one. `selective` counts as none of them, which is more than it keeps.
    `model` is its Transformers config; `kind` the device's, which `auto` keys depend on.
    """
    known = model.get_text_config()
    hidden, layers = known.hidden_size, known.num_hidden_layers
    heads = known.num_attention_heads
    width = getattr(known, "head_dim", None) or hidden // heads
    attended = (heads + 2 * (getattr(known, "num_key_value_heads", None) or heads)) * width
    units = getattr(known, "intermediate_size", None) or 4 * hidden
    expert = getattr(known, "moe_intermediate_size", None)
    if expert:
        units = max(units, expert * (getattr(known, "num_experts_per_tok", None) or 1))
    layer = 10 * hidden + 3 * attended + 4 * units
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
    room = memory - WEIGHT_BYTES * weights - 4 * int(config.logits_mib * 2**20)
    return max(0, int(ACTIVATIONS * room)) // activation_bytes(config, model, kind)
