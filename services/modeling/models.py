"""Loading a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import StartupError, UsageError
from umbra.services.config.rules import device_fault
from umbra.services.modeling.architectures import check_architecture
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.pretrained import (
    AS_IT_IS,
    loading,
    read_generation,
    read_transformers_config,
)
from umbra.services.modeling.weight_files import WeightFiles
from umbra.services.process.host import driver_version


def _sees_gpu(key: str) -> bool:
    if torch.cuda.is_available():
        return True
    if driver_version():  # a CPU would take days without a word
        raise StartupError(
            "there is an NVIDIA driver, but torch sees no GPU: `umbra check` says why; to compute "
            f"on the CPU, set {key} to cpu"
        )
    return False


def pick_device(device: str, key: str = "device") -> torch.device:
    """Return the torch device that `key` names, a GPU with its number; "auto" takes one.

    Raises:
        UsageError: an unknown name, or a GPU that is not there.
        StartupError: see `_sees_gpu`.
    """
    if device == "auto":
        return torch.device("cuda", 0) if _sees_gpu(key) else torch.device("cpu")
    if fault := device_fault(device, key, torch.cuda.device_count()):
        raise UsageError(fault)
    chosen = torch.device(device)
    return chosen if chosen.type == "cpu" else torch.device("cuda", chosen.index or 0)


def load_model(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    source: str = "model.path",
    checked: Collection[str] = (),
) -> Any:
    """Load the causal language model in `path`, and make its GPU the current one."""
    directory = check_model_dir(path, source)
    model: Any = read_weights(AutoModelForCausalLM, directory, dtype, source, checked)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what takes a thread's current device takes this one
    return model.to(device).eval()


def read_weights(
    kind: Any,
    directory: Path,
    dtype: torch.dtype,
    source: str,
    checked: Collection[str] = (),
    config: Any = None,
) -> PreTrainedModel:
    """Load the model in `directory` to the CPU, with an attention that computes all it asks for.

    `kind` is `AutoModelForCausalLM`, or `AutoModel` for one without its output layer; `config` is
    Transformers', in place of the one in `directory`. For `source` and `checked` see
    `check_architecture`.

    Raises:
        UsageError: it cannot be loaded, or Umbra is not right for it; see `check_architecture`,
            also for `source` and `checked`.
    """
    check_architecture(directory, source, checked)
    transformers_logging.disable_progress_bar()
    with loading(directory, source):
        config = config or read_transformers_config(directory)
        return kind.from_pretrained(
            directory,
            config=config,
            **AS_IT_IS,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
        )


def attention_implementation(config: Any) -> str:
    """Return Transformers' name of the fastest attention that is right for the model of `config`.

    Its SDPA drops a soft cap on scores without a word; classes that have learned sinks don't
    offer it.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    classes = AutoModelForCausalLM._model_mapping
    model = classes[type(config)] if type(config) in classes else None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


def outline_model(
    path: str | Path, source: str = "model.path", checked: Collection[str] = ()
) -> Any:
    directory = check_model_dir(path, source, weights=False)
    return _outline(AutoModelForCausalLM, directory, source, checked)


def open_weights(
    kind: Any, directory: Path, source: str, checked: Collection[str] = ()
) -> tuple[PreTrainedModel, WeightFiles]:
    """Return the model that `read_weights` gives, on the meta device, and its files."""
    model = _outline(kind, directory, source, checked, dtype=torch.float32).eval()
    return model, WeightFiles(directory, model, source)


def _outline(kind: Any, directory: Path, source: str, checked: Collection[str], **how: Any) -> Any:
    check_architecture(directory, source, checked)
    transformers_logging.disable_progress_bar()
    with loading(directory, source):
        config = read_transformers_config(directory)
        how = {**how, "attn_implementation": attention_implementation(config)}
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False, **how)
        if model.can_generate():
            model.generation_config = read_generation(directory, config)
    return model


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the repeated blocks of `model`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[torch.nn.Module] = []
    within: set[torch.nn.Module] = set()
    for module in model.modules():
        # A sharded module is of a class that FSDP derives from the model's own.
        if module not in within and any(c.__name__ in names for c in type(module).__mro__):
            layers.append(module)
            within.update(module.modules())
    if not layers:
        raise UsageError(
            f"model.path: {type(model).__name__} does not say what its layers are, so it can "
            "neither be sharded nor compiled nor recomputed by layers"
        )
    return layers
