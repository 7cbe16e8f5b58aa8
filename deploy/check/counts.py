"""Counts of a model's tensors by its config alone, where that is certain."""

from __future__ import annotations

from typing import Any

import msgspec

from umbra.services.config import TrainerConfig

# Architectures whose tensors `count_plain` knows, for tensors of ordinary kinds.
PLAIN = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("None", "float32", "bfloat16", "float16")


class Counts(msgspec.Struct, frozen=True):
    """Elements of a model's tensors."""

    parameters: int  # without an adapter, which is merged into the model
    adapter: int
    trained: int  # those that have a gradient
    outside: tuple[int, int]  # of the decoder's layers; how many of them are trained
    layer: tuple[int, int]  # in the largest decoder layer; how many of them are trained
    largest: int  # in the largest tensor
    eager: bool = False  # attention keeps its scores


class Build(msgspec.Struct, frozen=True, tag=True):
    """A model to count by building it without weights; `source` is the key that names it."""

    directory: str
    source: str
    trainer: TrainerConfig


def count_plain(config: Any, trainer: TrainerConfig) -> Counts | None:
    """Return the counts of a model, if its config alone tells that and that it can be built.

    None for anything unusual: such a model is built to be counted, and to see why it can't be.
    """
    if config.model_type not in PLAIN:
        return None
    rope = config.rope_parameters or {}
    width, layers, units = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", width // max(1, heads)) or 0
    unusual = (
        min(width, layers, units, heads, shared, head) < 1
        or heads % shared
        or config.hidden_act != "silu"
        or rope.keys() != {"rope_type", "rope_theta"}
        or rope["rope_type"] != "default"
        or not isinstance(rope["rope_theta"], int | float)
        or str(config.dtype).removeprefix("torch.") not in DTYPES
        or getattr(config, "attention_bias", False)
        or getattr(config, "mlp_bias", False)
        or not 0 <= (config.pad_token_id or 0) < config.vocab_size
    )
    if unusual:
        return None
    queries, keys = heads * head, shared * head
    linear = {
        "q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width),
        "o_proj": (width, queries), "gate_proj": (units, width), "up_proj": (units, width),
        "down_proj": (width, units),
    }  # fmt: skip
    targets = {*trainer.lora_targets} or {*linear}
    if trainer.lora_rank and not targets <= linear.keys():
        return None
    small = 2 * width  # norms and biases
    small += {"qwen2": queries + 2 * keys, "qwen3": 2 * head}.get(config.model_type, 0)
    layer, rank = small + sum(a * b for a, b in linear.values()), trainer.lora_rank
    added = rank * sum(a + b for name, (a, b) in linear.items() if name in targets)
    embedding = config.vocab_size * width
    outside = width + embedding * (1 if config.tie_word_embeddings else 2)
    parameters = outside + layers * layer
    return Counts(
        parameters=parameters,
        adapter=layers * added,
        trained=layers * added if rank else parameters,
        outside=(outside, 0 if rank else outside),
        layer=(layer + added, added if rank else layer),
        largest=max(embedding, *(a * b for a, b in linear.values())),
    )
