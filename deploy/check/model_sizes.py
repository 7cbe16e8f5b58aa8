"""Numbers of a model that its memory depends on, from its config.json; no weights are read."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict, replace

from umbra.deploy.check.counts import Build, Counts, count_plain
from umbra.deploy.check.hardware import ask_aside
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.architectures import check_architecture, keeps_state, layer_kinds
from umbra.services.modeling.model_directory import directory_of
from umbra.services.modeling.pretrained import loading, read_transformers_config, torch_is_hidden
from umbra.services.modeling.row_sizes import layer_numbers, state_numbers

ROOM_S = 600.0  # for another process to build a model without weights; it ends itself earlier


class ModelSizes(Counts, frozen=True, kw_only=True):
    """Counts of elements, not bytes."""

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
    frozen = replace(config.trainer, lora_rank=0)
    own = (_read(config, name, "scorer.model", frozen) for name in names)
    return replace(found, teachers=tuple(own))


def _read(config: RunConfig, name: str, source: str, trainer: TrainerConfig) -> ModelSizes:
    directory = directory_of(name, weights=False)
    check_architecture(directory, checked=config.model.checked)
    with loading(directory, source):
        model = read_transformers_config(directory)
        counts = count_plain(model, trainer)
    if counts is None:
        counts = count_built(Build(str(directory), source, trainer))
    return sizes_of(model, counts, latent=config.generator.engine == "vllm")


def count_built(build: Build) -> Counts:
    """Build a model to count it, in another process if this one does without torch."""
    if torch_is_hidden():
        return ask_aside(Counts, build, timeout_s=ROOM_S)
    from umbra.deploy.check.built import count

    return count(build)


def sizes_of(model_config: Any, counts: Counts, *, latent: bool = False) -> ModelSizes:
    """Return the sizes of a model by Transformers' config and its `counts`."""
    text = model_config.get_text_config()
    return ModelSizes(
        **asdict(counts),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        cache=cache_numbers(text, latent=latent),
        kept=layer_numbers(model_config),
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
