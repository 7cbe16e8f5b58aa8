"""The configured engine, and the chat that goes with its tokenizer."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.generator.checks import open_chat
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.models import load_model, outline_model, pick_device
from umbra.services.modeling.weights import put_adapter, weight_table
from umbra.services.weights.memory import private_memory, shared_memory


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine, its chat, and where new weights are put for it.

    `device` is torch's name of it, the first of `gpus`; host memory is what `allocate` gives.
    `dtype` is what the engine computes in, if new weights have to be in it: a trainer elsewhere
    decides for itself what `weight_hub.dtype = "auto"` means.
    """

    engine: Engine
    chat: Chat
    device: str
    allocate: Callable[[int], memoryview] = private_memory
    dtype: str = ""
    gpus: int = 1


def open_engine(config: RunConfig, name: str) -> OpenEngine:
    """Open the configured engine; `name` and the seed of the run seed its sampling.

    Raises:
        UsageError: no usable model or tokenizer, or settings that the engine does not have.
        StartupError: vLLM's processes did not come up.
    """
    engine = engine_here(config)
    seed = zlib.crc32(f"{config.run.seed}/{name}".encode())
    if engine == "vllm":
        return _vllm(config, seed)
    if fault := next(config.generator.engine_faults(engine), ""):
        raise UsageError(fault)
    return _servers(config) if engine == "vllm-http" else open_torch(config, seed)


def engine_here(config: RunConfig) -> str:
    generator = config.generator
    if generator.engine != "auto":
        return generator.engine
    kind = pick_device(generator.device, "generator.device").type
    return generator.engine_on(kind, vllm=importlib.util.find_spec("vllm") is not None)


def computes(config: RunConfig) -> tuple[str, str]:
    """Return engine, device and dtype of a generator that is not open yet, and its planes."""
    device, urls = config.generator.device, ", ".join(config.generator.urls)
    if device == "auto" and not urls:
        device = str(pick_device(device, "generator.device"))
    dtype = config.weight_hub.dtype_on(device.partition(":")[0])
    on = urls or f"{device} ({dtype})"  # servers decide for themselves
    return f"engine {engine_here(config)} on {on}", f"plane {config.weight_hub.plane}"


def _vllm(config: RunConfig, seed: int) -> OpenEngine:
    from umbra.services.generator.vllm.options import require_vllm, set_environment

    require_vllm()
    outline = outline_model(config.model.path, checked=config.model.checked)
    chat = open_chat(config, outline)
    set_environment(config.generator)
    from umbra.services.generator.vllm.engine import VllmEngine, platform  # brings vLLM

    engine = VllmEngine(
        check_model_dir(config.model.path),
        outline,
        config,
        stop_ids=chat.stop_ids,
        seed=seed,
        adapter=put_adapter(outline, config),
    )
    expected = config.weight_hub.expected_on(platform())
    device = "cuda:0" if platform() == "cuda" else "cpu"  # `set_environment` hides those before it
    gpus = config.generator.tensor_parallel
    return OpenEngine(engine, chat, device, shared_memory, expected, gpus)


def _servers(config: RunConfig) -> OpenEngine:
    from umbra.services.generator.vllm.http_engine import HttpEngine

    outline = outline_model(config.model.path, checked=config.model.checked)
    chat = open_chat(config, outline)
    engine = HttpEngine(
        outline, config, stop_ids=chat.stop_ids, key=os.environ.get("VLLM_API_KEY", "")
    )
    if config.weight_hub.dtype not in ("auto", engine.dtype):
        engine.close()
        raise UsageError(
            f"the servers of generator.urls compute in {engine.dtype}: start them with --dtype "
            f"{config.weight_hub.dtype}, or set weight_hub.dtype to {engine.dtype}"
        )
    return OpenEngine(engine, chat, "cpu", shared_memory, engine.dtype)


def open_torch(config: RunConfig, seed: int, source: str = "model.path") -> OpenEngine:
    """Open the torch engine; `source` is where the model is named, for errors."""
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    dtype = getattr(torch, config.weight_hub.dtype_on(device.type))  # of the weights it is served
    model = load_model(config.model.path, device, dtype, source, config.model.checked)
    chat = open_chat(config, model, source)
    engine = TorchEngine(
        model,
        stop_ids=chat.stop_ids,
        slots=config.generator.slots,
        max_context=config.generator.max_context,
        seed=seed,
        tell_routing=config.trainer.router_replay,
        tell_head=config.trainer.score_centering,
        weights=weight_table(model, config),
    )
    expected = config.weight_hub.expected_on(device.type)
    return OpenEngine(engine, chat, str(device), dtype=expected)
