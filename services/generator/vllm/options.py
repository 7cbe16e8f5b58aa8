"""From our configuration to vLLM's: is it there, its engine arguments, its environment."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from umbra.proto.errors import UsageError
from umbra.proto.records import Routing
from umbra.services.config import GeneratorConfig, RunConfig
from umbra.services.generator.vllm.plugin import ADAPTER_BACKEND, BACKEND, OURS_VARIABLE
from umbra.services.modeling.architectures import keeps_state
from umbra.services.modeling.experts import NO_ROUTERS, Routers, check_routing_fits
from umbra.services.modeling.lora import factors
from umbra.services.modeling.models import pick_device
from umbra.services.process.host import package_version

log = logging.getLogger(__name__)

TRIED = (0, 32)  # that runs were made with; 0.33 was read (`private.py`)
_BLOCK_TOKENS = 128  # of vLLM's KV cache on CPUs
_BIND, _NO_BIND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
_IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_KV_SPARE = 1.25  # room for prefixes that are kept for later requests
# Engine arguments that follow from keys of ours, or from nothing: our adapter is the only one.
_OURS = {
    "enable_return_routed_experts": "trainer.router_replay",
    "aux_output_config": "trainer.router_replay",
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "weight_hub.dtype",
    "seed": "run.seed",
    "max_model_len": "generator.max_context",
    "max_num_seqs": "generator.slots",
    "tensor_parallel_size": "generator.tensor_parallel",
    "data_parallel_size": "generator.count",
    **dict.fromkeys(("weight_transfer_config", "logprobs_mode", "skip_tokenizer_init"), ""),
    **dict.fromkeys(("disable_log_stats", "enable_lora", "max_loras", "max_lora_rank"), ""),
    **dict.fromkeys(("max_cpu_loras", "lora_dtype", "lora_target_modules"), ""),
    "fully_sharded_loras": "",
}
# Quantizations that vLLM computes from full weights, hence again from every published version, and
# that tests load new weights under (fp8 on GPUs only). It knows more.
_ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel", "int8_per_channel_weight_only")
_ONLINE_ON_CPUS = ("fp8_per_channel", "int8_per_channel_weight_only")  # it has no other kernels
_ALWAYS_TIED = ("cohere", "cohere2")  # vLLM 0.32 drops an output layer that they have of their own
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 makes room for
# Where vLLM's logprobs with an adapter were compared with the trainer's. No mixtures of experts:
# with adapters enabled, vLLM computes experts by Triton, which CPUs do not have.
_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3")


def require_vllm() -> None:
    """Raise UsageError unless a vLLM is installed that is new enough."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            'generator.engine = "vllm" needs vLLM, which is not installed: with a GPU, install '
            '"umbra-rl[vllm]"; without one, run `make setup` in a checkout, or see '
            "docs/generation.md"
        )
    installed = package_version("vllm") or package_version("vllm-cpu")
    tried = ".".join(map(str, TRIED))
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    minor = (int(numbers[1]), int(numbers[2])) if numbers else TRIED
    if minor > TRIED:
        log.warning(
            "vLLM %s is newer than %s, the newest that was tried: `umbra check-model MODEL` "
            "compares its logprobs",
            installed,
            tried,
        )
    if (0, 0) < minor < TRIED:  # 0.0: built from a checkout
        raise UsageError(
            f"vLLM {installed} is too old: new weights in mid-sequence need {tried} or newer, so "
            'upgrade it, or set generator.engine = "torch"'
        )


def set_environment(config: GeneratorConfig) -> None:
    """Set variables for vLLM, before its import; the user's stay. UsageError: no such device."""
    defaults = {
        OURS_VARIABLE: "1",
        "VLLM_NO_USAGE_STATS": "1",  # nothing about a run is sent anywhere
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # As on CPUs: in a fork of a process that asked torch for GPUs, CUDA does not work.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it has no logprobs of tokens cut off; saves nvcc
        _BIND: _NO_BIND,  # else all engines of a host share its first core
    }
    if config.threads:
        defaults["OMP_NUM_THREADS"] = str(config.threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if match := re.fullmatch(r"cuda:(\d+)", config.device):
        first, count, found = int(match[1]), config.tensor_parallel, torch.cuda.device_count()
        if first + count > found:
            raise UsageError(
                f'generator.device = "cuda:{first}" with generator.tensor_parallel = {count} needs '
                f"{first + count} GPUs, this machine has {found}"
            )
        before = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = before.split(",") if before else [str(index) for index in range(found)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + count])


def check_device(device: str, platform: str) -> None:
    """Raise UsageError unless a vLLM built for `platform` ("cpu", "cuda") runs on `device`.

    StartupError: there is a driver, and torch sees no GPU.
    """
    kind, note = device.partition(":")[0], ""
    if kind == "auto":
        kind = pick_device(device, "generator.device").type
        note = f", which is {kind} here"
    if kind != platform:
        built_for = platform or "cuda"
        raise UsageError(
            f'generator.device = "{device}"{note}, but the vLLM that is installed was built for '
            f'{built_for}: set generator.device = "{built_for}", or install the other build '
            "(docs/generation.md)"
        )


def kv_cache_bytes(hf_config: Any, config: GeneratorConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a KV cache with room for the longest sequence in every slot, and more."""
    text = hf_config.get_text_config()
    head = _head_size(text)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head * dtype.itemsize // config.tensor_parallel
    if latent := _latent_size(text):  # one vector for all heads, which every GPU keeps
        token = text.num_hidden_layers * latent * dtype.itemsize
    blocks = math.ceil(config.max_context / _BLOCK_TOKENS) * config.slots
    return int(_KV_SPARE * blocks * _BLOCK_TOKENS * token)


def _latent_size(text_config: Any) -> int:
    """Return the numbers per token of multi-head latent attention (DeepSeek); 0 = another kind."""
    latent = getattr(text_config, "kv_lora_rank", None)
    return latent + text_config.qk_rope_head_dim if latent else 0


def _head_size(text_config: Any) -> int:
    size = getattr(text_config, "head_dim", None)
    return size or text_config.hidden_size // text_config.num_attention_heads


def check_served(config: GeneratorConfig, hf_config: Any, platform: str) -> None:
    """Raise UsageError if vLLM 0.32 would serve this model wrong, or new weights of it."""
    if fault := next(_faults(config, hf_config, platform), ""):
        raise UsageError(fault)


def _faults(config: GeneratorConfig, hf_config: Any, platform: str) -> Iterator[str]:
    arguments, remedy = config.engine_args, 'set generator.engine = "torch"'
    known = _ONLINE_ON_CPUS if platform == "cpu" else _ONLINE
    if (method := arguments.get("quantization")) is not None and method not in known:
        where = "the build of vLLM for CPUs" if platform == "cpu" else "vLLM"
        yield (
            f'generator.engine_args.quantization = "{method}": {where} was not tested to quantize '
            f"new weights so: use {', '.join(known)}, or leave it out"
        )
    for name, why in {
        "quantization_config": "set generator.engine_args.quantization, to one of "
        + ", ".join(known),
        "speculative_config": "vLLM 0.32 with n-gram drafts gave logprobs that were off by up to "
        "3.6: leave it out",
        "enable_eplb": "vLLM moves experts between places and loads new weights into the places "
        "of the start; leave it out",
    }.items():
        if arguments.get(name):
            yield f"generator.engine_args.{name}: {why}"
    if arguments.get("all2all_backend") == "moonep":
        yield (
            'generator.engine_args.all2all_backend = "moonep" keeps a part of the experts where '
            "new weights don't reach it: choose another"
        )
    if getattr(hf_config, "quantization_config", None) is not None:
        yield (
            "model.path: its weights are quantized, and the trainer publishes full ones: give the "
            "directory of the full weights, and vLLM generator.engine_args.quantization"
        )
    text = hf_config.get_text_config()
    kind = text.model_type
    if kind == "gpt_oss":
        yield (
            "model.path: vLLM loads experts and sinks of a gpt_oss at its start only, so new "
            f"weights would not reach them: {remedy}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if platform == "cpu" and _latent_size(text) and rope.get("rope_type") == "default":
        yield (
            "model.path: on CPUs vLLM rotates queries wrongly in latent attention with plain "
            f"rotary positions (rope_type): {remedy}"
        )
    if platform == "cpu" and keeps_state(hf_config):
        yield (
            f"model.path: layers of a {kind} carry a state from token to token, and vLLM on CPUs "
            f"was not compared on them: {remedy}"
        )
    layers = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "use_sliding_window", False) and layers != {"sliding_attention"}:
        yield (
            f"model.path: vLLM gives all layers of a {kind} a window or none, and this model has "
            f"one in some (use_sliding_window, max_window_layers): {remedy}"
        )
    window = getattr(text, "sliding_window", None) or config.max_context
    if kind == "cohere2" and window < config.max_context:
        yield (
            "model.path: in the windows of a cohere2 vLLM has one token more than Transformers: "
            f"set generator.max_context to {window} at most, or {remedy.removeprefix('set ')}"
        )
    if kind in _ALWAYS_TIED and not text.tie_word_embeddings:
        yield (
            f"model.path: vLLM takes the embedding for the output layer of a {kind}, and this "
            f"model has another (tie_word_embeddings): {remedy}"
        )


def adapter_arguments(
    config: GeneratorConfig, hf_config: Any, rank: int, factors: Iterable[str]
) -> dict[str, Any]:
    """Return engine arguments for versions that are an adapter of `rank` alone.

    Layers without a name in `factors` get no room for an adapter.

    Raises:
        UsageError: vLLM was not seen to serve such an adapter right.
    """
    merged, fault = "set trainer.lora_publish = merged", ""
    if (model_type := hf_config.get_text_config().model_type) not in _ADAPTERS:
        fault = (
            f"trainer.lora_publish = adapter: vLLM with an adapter on a {model_type} was not "
            f'compared with the trainer: {merged}, or generator.engine = "torch"'
        )
    elif rank > _LORA_RANKS[-1]:
        fault = (
            f"trainer.lora_rank = {rank}: vLLM serves adapters of rank {_LORA_RANKS[-1]} at most: "
            f"lower it, or {merged}"
        )
    elif "quantization" in config.engine_args:
        fault = (
            "generator.engine_args.quantization: vLLM with an adapter on quantized weights was "
            f"not compared with the trainer: leave it out, or {merged}"
        )
    if fault:
        raise UsageError(fault)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(known for known in _LORA_RANKS if known >= rank),
        "lora_target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in factors}),
        "weight_transfer_config": {"backend": ADAPTER_BACKEND},
    }


def _check_arguments(config: GeneratorConfig) -> None:
    """Raise UsageError for unknown `engine_args`, and those that a key of Umbra's sets."""
    for name in config.engine_args:
        if (key := _OURS.get(name)) is not None:
            remedy = f"set {key} instead" if key else "Umbra sets it itself, leave it out"
            raise UsageError(f"generator.engine_args.{name}: {remedy}")
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in config.engine_args:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.0)
            raise UsageError(
                f"generator.engine_args.{name}: vLLM has no such engine argument; "
                f"did you mean {near[0]}?"
            )


def check_run(config: RunConfig, outline: Any) -> None:
    """Raise the UsageError of a generator that would refuse this run before it starts vLLM.

    `outline` is the model without weights, with the adapter of the run.
    """
    require_vllm()
    # By the packages alone, as importing vLLM takes seconds.
    is_cpu = package_version("vllm-cpu") or "cpu" in package_version("vllm")
    rank = config.trainer.lora_rank if config.trainer.lora_publish == "adapter" else 0
    engine_arguments(config, Path(), outline, "cpu" if is_cpu else "cuda", rank=rank)


def engine_arguments(
    run: RunConfig, path: Path, outline: Any, platform: str, *, seed: int = 0, rank: int = 0
) -> dict[str, Any]:
    """Return arguments of `AsyncEngineArgs` for the model in `path`, without weights `outline`.

    Versions are an adapter of `rank`, or whole weights if that is 0.

    Raises UsageError: the vLLM for `platform` refuses them, or would serve the model wrong.
    """
    config, hf_config, dtype = run.generator, outline.config, run.weight_hub.dtype_on(platform)
    check_device(config.device, platform)
    _check_arguments(config)
    check_served(config, hf_config, platform)
    ours: dict[str, Any] = {
        "model": str(path),
        "dtype": dtype,
        "seed": seed % 2**31,
        "max_model_len": config.max_context,
        "max_num_seqs": config.slots,
        "tensor_parallel_size": config.tensor_parallel,
        "skip_tokenizer_init": True,  # it gets tokens and gives tokens
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "max_logprobs": -1,  # a request asks for as many as its sampling keeps
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
    }
    if platform == "cpu":
        from umbra.services.generator.vllm.private import cpu_head_sizes  # brings vLLM

        text = hf_config.get_text_config()
        known = cpu_head_sizes(latent=bool(_latent_size(text)))
        # vLLM itself notices only at the first request.
        if (size := _latent_size(text) or _head_size(text)) not in known:
            raise UsageError(
                f"model.path: vLLM on CPUs serves heads of {', '.join(map(str, known))} "
                f'dimensions, this model has {size}: set generator.engine = "torch"'
            )
        # Compiling takes longer than it saves there, and "90 % of the memory" is too much where
        # trainer and buffer run too.
        ours["enforce_eager"] = True
        needed = kv_cache_bytes(hf_config, config, getattr(torch, dtype))
        ours["kv_cache_memory_bytes"] = needed
        if config.tensor_parallel == 1 and os.environ.get(_BIND, _NO_BIND) == _NO_BIND:
            # Not "uni", which vLLM turns into "mp": a core that spins until its worker is done.
            ours["distributed_executor_backend"] = _IN_CORE
    if run.trainer.router_replay:
        reported_routers(outline, platform, config.max_context)
        ours["enable_return_routed_experts"] = True
    if rank:
        ours |= adapter_arguments(config, hf_config, rank, factors(outline))
    return ours | config.engine_args


def routing(routers: Routers, *chunks: Any) -> Routing:
    """Join vLLM's arrays [rows, all layers, choices], which may be None."""
    kind = np.uint8 if routers.experts <= 256 else np.dtype("<u2")
    rows = [chunk[:, routers.places] for chunk in chunks if chunk is not None]
    chosen = b"".join(np.ascontiguousarray(part, dtype=kind).tobytes() for part in rows)
    layers, choices, experts = routers.kind
    return Routing(layers=layers, choices=choices, experts=experts, chosen=chosen)


def reported_routers(outline: Any, platform: str, max_context: int) -> Routers:
    """Return the routers of the model `outline` whose choices vLLM for `platform` reports.

    Raises:
        UsageError: there are none, it does not, or a sequence of `max_context` tokens has too many.
    """
    if platform == "cpu":
        raise UsageError(
            "trainer.router_replay: vLLM on CPUs does not say which experts it chose: set it to "
            'false, or generator.engine = "torch"'
        )
    routers = Routers.of(outline)
    if routers is None:
        raise UsageError(NO_ROUTERS)
    check_routing_fits(routers.kind, max_context)
    return routers
