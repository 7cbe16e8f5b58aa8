"""Tiny random models of the architectures that Umbra is tried with, from Transformers' own classes.

A model is a Hugging Face directory like any other: config, weights in float32, a tokenizer of one
token per character. Every weight is drawn so that leaving any part of the model out changes its
logprobs by far more than rounding does: norms are not ones, biases, sinks and corrections of a
router not zeros.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from umbra.services.trainer.make_model import END, PAD, SPECIAL_TOKENS, make_tokenizer

WINDOW = 8  # tokens; less than the sequences of the tests, so that windows matter
CONTEXT = 256
_FULL, _LINEAR = "full_attention", "linear_attention"
_BASE: dict[str, Any] = {
    "vocab_size": len(make_tokenizer()),
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(END),
    **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    **{"intermediate_size": 96, "tie_word_embeddings": False, "initializer_range": 0.1},
    "max_position_embeddings": CONTEXT,
}
# Every class takes those that it has.
_SIZES: dict[str, Any] = {
    **_BASE,
    **{"query_pre_attn_scalar": 24, "no_rope_layers": [1, 0]},
    # Factors.
    **{"attention_multiplier": 0.3, "logits_scaling": 2.0, "logit_scale": 0.5},
    **{"lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_out_multiplier": 0.6},
    "mlp_multipliers": [0.8, 1.2],
    # Latent attention.
    **{"q_lora_rank": 24, "kv_lora_rank": 32},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24},
    # Experts.
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_intermediate_size": 48},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
    **{"first_k_dense_replace": 1, "num_dense_layers": 1, "num_mtp_layers": 0},
    **{"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW},
    # States.
    **{"mamba_n_heads": 8, "n_mamba_heads": 8, "mamba_num_heads": 8, "num_heads": 8},
    **{"mamba_n_groups": 2, "mamba_ngroups": 2, "n_groups": 2, "mamba_head_dim": 16},
    **{"mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16, "mamba_d_ssm": 128},
    **{"mamba_chunk_size": 16, "chunk_size": 16, "block_size": 16, "block_multiple_of": 16},
    **{"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


@dataclass(frozen=True)
class Architecture:
    """A Transformers config class and what of its defaults a tiny model changes.

    `own` are fields beside `_SIZES`, of which it takes what it has; `about` is for the docs.
    """

    name: str
    kind: str  # name of the class, without "Config"
    own: dict[str, Any]
    about: str

    def config(self, layers: int = 2) -> PreTrainedConfig:
        kind = getattr(transformers, f"{self.kind}Config")
        fields = {**_SIZES, "num_hidden_layers": layers}
        names = {one.name for one in dataclasses.fields(kind)}
        return kind(**{name: fields[name] for name in fields.keys() & names} | self.own)

    def model(self, seed: int = 0) -> PreTrainedModel:
        """A model with random weights, which depend on `seed` alone."""
        config = self.config()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.kind == "Qwen3VL":
                model: Any = transformers.Qwen3VLForConditionalGeneration(config)
            else:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _disturb(model)
        ends = {name: _BASE[name] for name in ("eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
        return model.eval()

    def write(self, out: Path) -> Path:
        """Write such a model to the directory `out`."""
        self.model().save_pretrained(out)
        make_tokenizer(CONTEXT).save_pretrained(out)
        return out


@torch.no_grad()
def _disturb(model: PreTrainedModel) -> None:
    """Move every parameter and stored buffer off the value that it was initialised with."""
    for parameter in model.parameters():
        scale = 0.1 if parameter.dim() == 1 else 1 / math.sqrt(parameter.shape[-1])
        parameter.add_(torch.randn_like(parameter) * scale)
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer) * 0.1)


def _tiny(name: str, kind: str, about: str = "", **own: Any) -> Architecture:
    return Architecture(name, kind, own, about)


_SOME, _ALL = "windows in some layers", "windows in all layers"
_NO_MTP = "without layers for multi-token prediction"
_MIXED: dict[str, Any] = {"layer_types": [_LINEAR, _FULL]}
_CONV: dict[str, Any] = {"layer_types": ["conv", _FULL]}
_LAYERED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", _FULL]}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_TEXT = {**_BASE, "num_hidden_layers": 2, "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5]}}
_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
    **{"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 2}
_NO_STATES: dict[str, Any] = {"layer_types": [_FULL, _FULL], "position_embedding_type": "rope"}
_TABLE = (
    _tiny("qwen3", "Qwen3"),
    _tiny("qwen3-tied", "Qwen3", "tied embeddings", tie_word_embeddings=True),
    _tiny("qwen2.5", "Qwen2"),
    _tiny(
        "qwen2.5-window",
        "Qwen2",
        _SOME,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    _tiny("llama", "Llama"),
    _tiny("llama3-rope", "Llama", "rotary positions of Llama 3", rope_parameters=_LLAMA3),
    _tiny("mistral", "Mistral", sliding_window=None),
    _tiny("mistral-window", "Mistral", _ALL, sliding_window=WINDOW),
    _tiny("phi3", "Phi3"),
    _tiny("phi3-window", "Phi3", _ALL, sliding_window=WINDOW),
    _tiny("olmo2", "Olmo2"),
    _tiny("olmo3", "Olmo3", _SOME, **_LAYERED),
    _tiny("glm4", "Glm4"),
    _tiny("smollm3", "SmolLM3", "some layers without rotary positions"),
    _tiny(
        "granite",
        "Granite",
        "all four multipliers",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
    ),
    _tiny("cohere", "Cohere", "scaled logits"),
    _tiny("cohere2", "Cohere2", f"scaled logits, {_SOME}", **_LAYERED),
    _tiny(
        "gemma2",
        "Gemma2",
        f"soft caps on scores and logits, {_SOME}",
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        **_LAYERED,
    ),
    _tiny("gemma3", "Gemma3Text", f"the text model, {_SOME}", **_LAYERED),
    _tiny("starcoder2", "Starcoder2", _ALL, sliding_window=WINDOW),
    _tiny("qwen3-moe", "Qwen3Moe"),
    _tiny("qwen2-moe", "Qwen2Moe"),
    _tiny("mixtral", "Mixtral", sliding_window=None),
    _tiny("mixtral-window", "Mixtral", _ALL, sliding_window=WINDOW),
    _tiny("deepseek-v3", "DeepseekV3", f"latent attention, {_NO_MTP}", **_GROUPS),
    _tiny("glm4-moe", "Glm4Moe", _NO_MTP, use_qk_norm=True),
    _tiny("gpt-oss", "GptOss", f"sinks, {_SOME}", rope_parameters=_ROPE, **_LAYERED),
    _tiny("llama4", "Llama4Text"),
    _tiny("qwen3-next", "Qwen3Next", "states", **_MIXED),
    _tiny("qwen3.5", "Qwen3_5Text", "the text model, states", **_MIXED),
    _tiny("qwen3.5-moe", "Qwen3_5MoeText", "the text model, states", **_MIXED),
    _tiny("granite-hybrid", "GraniteMoeHybrid", "states", **_MIXED),
    _tiny(
        "granite-hybrid-dense",
        "GraniteMoeHybrid",
        "attention in all layers",
        num_local_experts=0,
        **_NO_STATES,
    ),
    _tiny("nemotron-h", "NemotronH", "states", layers_block_type=[_LINEAR, "moe", _FULL, "mlp"]),
    _tiny("bamba", "Bamba", "states"),
    _tiny("falcon-h1", "FalconH1", "scaled logits, states", embedding_multiplier=2.0),
    _tiny("jamba", "Jamba", "states"),
    _tiny(
        "zamba2", "Zamba2", "states", num_key_value_heads=2, layers_block_type=[_LINEAR, "hybrid"]
    ),
    _tiny("lfm2", "Lfm2", "states", **_CONV),
    _tiny("lfm2-moe", "Lfm2Moe", "states", **_CONV),
    _tiny("mamba", "Mamba", "states"),
    _tiny("falcon-mamba", "FalconMamba", "states"),
    _tiny("mamba2", "Mamba2", "states", head_dim=16),
    _tiny("minimax", "MiniMax", **_MIXED),
    _tiny("qwen3-vl", "Qwen3VL", text_config=_TEXT, vision_config=_VISION),
    _tiny("gemma", "Gemma"),
    _tiny("ministral", "Ministral", _SOME, **_LAYERED),
    _tiny("olmoe", "Olmoe"),
    _tiny("seed-oss", "SeedOss"),
    _tiny("ernie4.5", "Ernie4_5"),
    _tiny("exaone4", "Exaone4", _SOME, **_LAYERED),
    _tiny("bloom", "Bloom", "stands for any architecture that is not listed above", n_head=2),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _TABLE}
