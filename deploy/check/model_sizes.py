"""Numbers of a model that its memory depends on, from its config.json; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.architectures import check_architecture, keeps_state, layer_kinds
from umbra.services.modeling.model_directory import directory_of
from umbra.services.modeling.models import (
    attention_implementation,
    decoder_layers,
    loading,
    read_transformers_config,
)
from umbra.services.modeling.row_sizes import layer_numbers, state_numbers


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Counts of elements, not bytes."""

    parameters: int  # without an adapter, which is merged into the model
    adapter: int
    trained: int  # those that have a gradient
    outside: tuple[int, int]  # of the decoder's layers; how many of them are trained
    layer: tuple[int, int]  # in the largest decoder layer; how many of them are trained
    largest: int  # in the largest tensor
    layers: int
    hidden: int
    vocabulary: int
    cache: int  # of keys and values, for a token in all layers
    kept: int  # of a token in a layer that the backward pass needs (`layer_numbers`)
    states: int = 0  # of a sequence, in layers that carry one
    scores: int = 0  # of a pair of positions in a layer that eager attention keeps
    config: Any = None  # Transformers', by which the trainer chooses the length of rows
    teachers: tuple[ModelSizes, ...] = ()  # of `scorer.model`


def read_sizes(config: RunConfig) -> ModelSizes:
    """Return the sizes of a run's models; raise UsageError if one is missing or refused."""
    if not config.model.path:
        raise UsageError("model.path is empty: name a directory with the model's config.json")
    found = _read(config, config.model.name, "model.path", config.trainer)
    names = dict.fromkeys(config.scorer.models.values())
    frozen = msgspec.structs.replace(config.trainer, lora_rank=0)
    own = (_read(config, name, "scorer.model", frozen) for name in names)
    return replace(found, teachers=tuple(own))


def _read(config: RunConfig, name: str, source: str, trainer: TrainerConfig) -> ModelSizes:
    directory = directory_of(name, weights=False)
    check_architecture(directory, checked=config.model.checked)
    with loading(directory, source):
        model = read_transformers_config(directory)
        return sizes_of(model, trainer, latent=config.generator.engine == "vllm")


def sizes_of(model_config: Any, trainer: TrainerConfig, *, latent: bool = False) -> ModelSizes:
    """Return the sizes of a model by Transformers' config, with the adapter of `trainer`."""
    eager = (attention := attention_implementation(model_config)) == "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=attention, trust_remote_code=False
        )
    if trainer.lora_rank:
        from umbra.services.modeling.lora import add_adapter  # brings peft

        add_adapter(model, trainer, seed=0)
    places = {id(p): i for i, one in enumerate(decoder_layers(model)) for p in one.parameters()}
    counts: dict[int, list[int]] = {-1: [0, 0]}  # by layer, -1 is outside of them: all, trained
    adapter = largest = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        own = counts.setdefault(places.get(id(parameter), -1), [0, 0])
        own[0] += count
        own[1] += count * parameter.requires_grad
        adapter += count * (".lora_" in name)
        largest = max(largest, count)
    parameters, trained = map(sum, zip(*counts.values(), strict=True))
    outside = counts.pop(-1)
    layer = max(counts.values(), default=[0, 0])
    text = model_config.get_text_config()
    return ModelSizes(
        parameters=parameters - adapter,
        adapter=adapter,
        trained=trained,
        outside=(outside[0], outside[1]),
        layer=(layer[0], layer[1]),
        largest=largest,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        cache=cache_numbers(text, latent=latent),
        kept=layer_numbers(model_config),
        states=state_numbers(model_config),
        scores=3 * getattr(text, "num_attention_heads", 0) if eager else 0,
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
