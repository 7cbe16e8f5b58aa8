"""Which models Umbra is right for, decided from their `config.json` before anything is loaded.

An architecture is one of `PROVEN`, for which the tests compare training, generation, publishing
and export with Transformers, or it is refused. A config may also ask for something that is wrong in
shared rows or in a cache: `in_the_way` names it. `docs/models.md` has the list with its outcomes.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from umbra.proto.errors import UNREADABLE, UsageError

# Transformers' `model_type`. In the first some layers carry a state from token to token.
RECURRENT = frozenset(
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h "
    "qwen3_5_moe_text qwen3_5_text qwen3_next zamba2".split()
)
PROVEN = RECURRENT | frozenset(
    "cohere cohere2 deepseek_v3 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 glm4_moe gpt_oss "
    "granite llama ministral mistral mixtral olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3 "
    "qwen3_moe seed_oss smollm3 starcoder2".split()
)
# Of those, the ones whose experts ranks can divide; and where a config says how many there are.
_DIVISIBLE = frozenset("deepseek_v3 glm4_moe gpt_oss mixtral olmoe qwen2_moe qwen3_moe".split())
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Of `PROVEN`, the ones whose class looks at `layer_types`; all others give each layer one window.
_BY_LAYER = frozenset(
    "cohere2 exaone4 gemma2 gemma3_text gpt_oss ministral olmo3 qwen2 qwen2_moe qwen3 "
    "smollm3".split()
)
_ATTENTION = {"full_attention", "sliding_attention"}
# Of kinds of layers, those that carry a state; "hybrid" attends as well.
_STATEFUL = {"linear_attention", "conv", "hybrid"}
# Fields that only architectures with a running state have.
_STATE = (
    "state_size ssm_state_size ssm_cfg mamba_d_state mamba_num_heads linear_num_value_heads "
    "linear_attn_config conv_L_cache conv_kernel lru_width time_mix_extra_dim".split()
)
_CHANGING_ROPE = ("dynamic", "longrope", "su")


def check_architecture(
    directory: str | Path, source: str = "model.path", checked: Collection[str] = ()
) -> None:
    """Raise UsageError for the model in `directory` unless Umbra is known to be right for it.

    `source` is the key or flag it came from; `checked` are architectures (`model_type`) for which
    the user has run `umbra check-model`.
    """
    config = read_config(directory, source)
    try:
        name, fault = architecture(config), in_the_way(config)
    except (AttributeError, LookupError, TypeError) as error:
        raise UsageError(
            f"{source}: {directory}/config.json is no model's: {error}; download it again"
        ) from error
    if fault:
        raise UsageError(f"{source}: {directory} is a {name}, which {fault}: Umbra can't run it")
    kind = str(config.get("model_type", ""))
    if kind not in PROVEN and kind not in checked:
        raise UsageError(
            f"{source}: {directory} is a {name}, an architecture that Umbra was not tested with: "
            f"compare it with `umbra check-model {directory}`, and if all is equal set "
            f'model.checked = ["{kind}"]'
        )


def read_config(directory: str | Path, source: str = "model.path") -> dict[str, Any]:
    """Return the `config.json` in `directory`; raise UsageError if it is no JSON object."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"{source}: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{source}: {path} is no JSON object")
    return config


def check_heads(config: Mapping[str, Any], ranks: int) -> None:
    """Raise UsageError unless query heads can be divided evenly; key heads are repeated."""
    if ranks > 1 and config.get("model_type") in RECURRENT:
        raise UsageError(
            f"trainer.sequence_parallel = {ranks}: layers of a {architecture(config)} carry a "
            "state from token to token, so ranks can't share a sequence: set it to 1"
        )
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        raise UsageError(
            f"trainer.sequence_parallel = {ranks} cannot divide the {heads} attention heads of a "
            f"{architecture(config)}: use a divisor of {heads}"
        )


def check_experts(config: Mapping[str, Any], ranks: int) -> None:
    """Raise UsageError unless each layer's experts can be divided evenly over so many ranks."""
    if ranks == 1:
        return
    if config.get("model_type", "") not in _DIVISIBLE:
        raise UsageError(
            f"trainer.expert_parallel = {ranks}: a {architecture(config)} has no experts, or was "
            "not tested with it: set it to 1"
        )
    counts = {count for key in _EXPERTS if isinstance(count := config.get(key), int)}
    for count in counts:
        if count % ranks:
            raise UsageError(
                f"trainer.expert_parallel = {ranks} cannot divide the {count} experts of a "
                f"{architecture(config)}: use a divisor of {count}"
            )


def architecture(config: Mapping[str, Any]) -> str:
    """Return the model's class, or else its `model_type`."""
    named = config.get("architectures") or [config.get("model_type") or "model of no known type"]
    return str(named[0])


def layer_kinds(config: Any) -> list[str]:
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def keeps_state(config: Any) -> bool:
    """True if layers would carry a state into the next sequence of a row; `Scorer` checks that."""
    return not _STATEFUL.isdisjoint(layer_kinds(config))


def head_widths(config: Any) -> tuple[int, int]:
    """Return the dimensions of a head's queries and keys, and of its values."""
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width


def cache_argument(model: Any) -> str:
    """Return the argument by which the forward pass of a Transformers model takes its cache."""
    named = inspect.signature(type(model).forward).parameters
    return "cache_params" if "cache_params" in named else "past_key_values"


def in_the_way(config: Mapping[str, Any]) -> str:
    """Return a feature that Umbra computes wrongly, as the rest of "which ...", or ""."""
    layers = config.get("layer_types") or []
    strange = sorted(set(layers) - _ATTENTION)
    others = [key for key in config if key.endswith(("vision_config", "audio_config"))]
    if others or "text_config" in config:
        return f"has more than a text model ({', '.join(others) or 'text_config'})"
    if config.get("is_encoder_decoder"):
        return "is an encoder with a decoder (is_encoder_decoder)"
    if config.get("attention_chunk_size") or "chunked_attention" in strange:
        return "attends in chunks (attention_chunk_size), which packed rows don't keep"
    state = [key for key in _STATE if config.get(key) is not None]
    if (strange or state) and config.get("model_type") not in RECURRENT:
        reason = ", ".join(strange or state)
        return f"carries a state from token to token in a way that was not tested ({reason})"
    limits = config.get("time_step_limit") or ()
    if any(isinstance(limit, int | float) and 0 < limit < math.inf for limit in limits):
        return "limits time steps (time_step_limit), as Transformers does in whole sequences only"
    if config.get("use_bidirectional_attention"):
        return "attends to later tokens too (use_bidirectional_attention)"
    # Settings of rotary positions, for all layers or for each kind of layer.
    ropes = [r for k in ("rope_scaling", "rope_parameters") if isinstance(r := config.get(k), dict)]
    ropes += [own for rope in ropes for own in rope.values() if isinstance(own, dict)]
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type"))
        if kind in _CHANGING_ROPE:
            return (
                "turns positions by angles that depend on the longest sequence of a row (rope type "
                f"{kind})"
            )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else ""
        return f"has quantized weights ({method or 'quantization_config'}): write them out whole"
    kind = config.get("model_type")
    windows = config.get("sliding_window") or "sliding_attention" in layers
    if kind in PROVEN and kind not in _BY_LAYER and layers and windows:
        return "has layer_types that its class does not read"
    return ""
