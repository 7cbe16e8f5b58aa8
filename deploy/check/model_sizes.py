"""Numbers of a model that its memory depends on, from its config.json; no weights are read.

Tensors of well-known architectures are counted by the config alone, others by building the model
without weights.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from umbra.deploy.check.machine import ask_aside
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.architectures import check_architecture, keeps_state, layer_kinds
from umbra.services.modeling.model_directory import directory_of
from umbra.services.modeling.pretrained import loading, read_transformers_config, torch_is_hidden
from umbra.services.modeling.row_sizes import layer_numbers, state_numbers

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
    """A model to count by building it without weights."""

    directory: str
    source: str  # the key that names it
    trainer: TrainerConfig


def count_plain(config: Any, trainer: TrainerConfig) -> Counts | None:
    """Return the counts of a model, if its config alone tells that and that it can be built.

    None for anything unusual: such a model is built to be counted, and to see why it can't be.
    """
    if config.model_type not in PLAIN:
        return None
    rope = config.rope_parameters or {}
    width, layers, units = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", width // max(1, heads)) or 0
    unusual = (
        min(width, layers, units, heads, kv_heads, head) < 1
        or heads % kv_heads
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
    queries, keys = heads * head, kv_heads * head
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
    adapter = rank * sum(a + b for name, (a, b) in linear.items() if name in targets)
    embedding = config.vocab_size * width
    outside = width + embedding * (1 if config.tie_word_embeddings else 2)
    parameters = outside + layers * layer
    return Counts(
        parameters=parameters,
        adapter=layers * adapter,
        trained=layers * adapter if rank else parameters,
        outside=(outside, 0 if rank else outside),
        layer=(layer + adapter, adapter if rank else layer),
        largest=max(embedding, *(a * b for a, b in linear.values())),
    )


class ModelSizes(Counts, frozen=True, kw_only=True):
    """Counts of elements, not bytes."""

    layers: int
    hidden: int
    vocabulary: int
    cache: int  # of keys and values, for a token in all layers
    activations: int  # of a token in a layer that the backward pass needs (`layer_numbers`)
    states: int = 0  # of a sequence, in layers that carry one
    scores: int = 0  # of a pair of positions in a layer that eager attention keeps
    config: Any = None  # Transformers', by which the trainer chooses the length of rows
    teachers: tuple[ModelSizes, ...] = ()  # of `scorer.model`


def read_sizes(config: RunConfig) -> ModelSizes:
    """Return the sizes of a run's models; raise UsageError if one is missing or refused."""
    if not config.model.path:
        raise UsageError("model.path is empty: name a directory with the model's config.json")
    names, frozen = {*config.scorer.models.values()}, replace(config.trainer, lora_rank=0)
    teachers = (_model_sizes(config, name, "scorer.model", frozen) for name in sorted(names))
    policy = _model_sizes(config, config.model.path, "model.path", config.trainer)
    return replace(policy, teachers=tuple(teachers))


def _model_sizes(config: RunConfig, name: str, source: str, trainer: TrainerConfig) -> ModelSizes:
    directory = directory_of(name, weights=False)
    check_architecture(directory, checked=config.model.checked)
    with loading(directory, source):
        model = read_transformers_config(directory)
        counts = count_plain(model, trainer)
    if counts is None:
        build = Build(str(directory), source, trainer)
        if torch_is_hidden():  # then another process builds it
            counts = ask_aside(Counts, build)
        else:
            from umbra.deploy.check.aside import count

            counts = count(build)
    return sizes_of(model, counts, latent=config.generator.engine == "vllm")


def sizes_of(model_config: Any, counts: Counts, *, latent: bool = False) -> ModelSizes:
    """Return the sizes of a model by Transformers' config and its `counts`."""
    text = model_config.get_text_config()
    return ModelSizes(
        **asdict(counts),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        cache=cache_numbers(text, latent=latent),
        activations=layer_numbers(model_config),
        states=state_numbers(model_config),
        scores=3 * getattr(text, "num_attention_heads", 0) if counts.eager else 0,
        config=model_config,
    )


def cache_numbers(config: Any, *, latent: bool) -> int:
    """Return the elements cached of a token in all layers; windows are not taken into account.

    With `latent`, multi-head latent attention caches what it has compressed, as vLLM does.
    """
    layers, heads = config.num_hidden_layers, getattr(config, "num_attention_heads", 0)
    if keeps_state(config):
        layers = sum(kind in ("full_attention", "hybrid") for kind in layer_kinds(config))
    if not layers or not heads:
        return 0
    if getattr(config, "kv_lora_rank", None):
        if latent:
            return layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return layers * heads * (key + config.v_head_dim)
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * 2 * (getattr(config, "num_key_value_heads", None) or heads) * head
