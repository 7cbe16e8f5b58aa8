"""Models of Hugging Face directories: loaded whole, or on the meta device and read by rows.

A model's class may hold weights otherwise than its files do: experts as one stacked tensor, tied
weights once. Transformers has rules for that, and reads of a DTensor its local rows alone; here it
does so layer by layer, so nobody holds more than one besides the rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import StartupError, UsageError
from umbra.services.config.rules import device_fault
from umbra.services.modeling.architectures import check_architecture
from umbra.services.modeling.model_directory import WEIGHT_FILES, check_model_dir
from umbra.services.modeling.pretrained import (
    AS_IT_IS,
    loading,
    read_generation,
    read_transformers_config,
)
from umbra.services.modeling.sharded import local
from umbra.services.process.host import driver_version

_LAYER = re.compile(r".*?\.\d+\.")
SHOWN = 3  # names in an error


def pick_device(device: str, key: str = "device") -> torch.device:
    """Return the torch device that `key` names, a GPU with its number; "auto" takes one.

    Raises:
        UsageError: an unknown name, or a GPU that is not there.
        StartupError: "auto" finds a driver, but torch no GPU: a CPU would take days without a word.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if driver_version():
            raise StartupError(
                "there is an NVIDIA driver, but torch sees no GPU: `umbra check` says why; to "
                f"compute on the CPU, set {key} to cpu"
            )
        return torch.device("cpu")
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
    Transformers', in place of the one in `directory`.

    Raises UsageError if it cannot be loaded, or Umbra is not right for it; see
    `check_architecture`, also for `source` and `checked`.
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

    Its SDPA drops a soft cap on scores without a word; classes with learned sinks don't offer it.
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
    with loading(directory, source), torch.device("meta"):
        config = read_transformers_config(directory)
        how["attn_implementation"] = attention_implementation(config)
        model = kind.from_config(config, trust_remote_code=False, **how)
        if model.can_generate():
            model.generation_config = read_generation(directory, config)
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks of `model`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    within: set[nn.Module] = set()
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


class WeightFiles:
    """The files that tensors of `model`, which is on the meta device, are read from.

    Its buffers are there afterwards, as its class computes them. Parameters stay on the meta device
    until they are read.
    """

    def __init__(self, directory: Path, model: PreTrainedModel, source: str = "model.path") -> None:
        self._directory = directory
        self._source = source
        self._model = model
        self._plain = deepcopy(model)  # without what will be put around layers of the other
        _make_buffers(model)

    @torch.no_grad()
    def read(self, places: Mapping[str, Tensor]) -> None:
        """Load into `places`: by name the rows of each state-dict tensor, cast to their dtype.

        Raises UsageError if a file cannot be read, or is of another model.
        """
        plain = self._plain
        rules = get_model_conversion_mapping(plain)
        first = {n: next(m for m in tied if m in places) for tied in _tied(plain) for n in tied}
        for name in first:
            _put(plain, name, places[first[name]])
        faults, missing = list[str](), {n for n, p in places.items() if local(p).numel()}
        try:
            for keys in self._layers().values():
                report = self._load(keys, rules)
                faults += [
                    f"{name}: {reason.rpartition(chr(10))[0].rpartition(chr(10))[2]}"
                    for name, reason in report.conversion_errors.items()
                    if local(places[first[name]]).numel()  # else there is nothing to stack
                ]
                faults += [
                    f"{name} is {list(shape)}, config.json says {list(expected)}"
                    for name, shape, expected in report.mismatched_keys
                ]
                for name in first.keys() - report.missing_keys if not faults else ():
                    place = places[first[name]]
                    rows, stored = local(place), local(attrgetter(name)(plain))
                    if first[name] in missing:
                        rows.copy_(stored)
                        missing.discard(first[name])
                    elif not torch.equal(rows, stored.to(rows)):
                        faults.append(
                            f"{name} is tied to {first[name]} by config.json, and another tensor "
                            "in the files: set tie_word_embeddings to false there"
                        )
                    _put(plain, name, place)
        except (OSError, SafetensorError) as error:
            faults.append(str(error))
        faults += [f"its files have no {name}" for name in sorted(missing) if not faults]
        if any(isinstance(place, DTensor) for place in places.values()):
            faults += [fault for rule in rules if (fault := _not_by_rows(rule))]
        if faults:
            more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            shown = "; ".join(faults[:SHOWN]) + more
            raise UsageError(f"{self._source}: {self._directory} cannot be loaded: {shown}")
        # So that exports get the names of before.
        self._model._weight_conversions = plain._weight_conversions

    def _layers(self) -> dict[str, dict[str, Path]]:
        """Return the files of tensors, by layer and by name in the files."""
        whole, index = (self._directory / name for name in WEIGHT_FILES)
        if whole.is_file():
            with safe_open(whole, framework="pt") as file:
                files = dict.fromkeys(file.keys(), whole.name)
        else:
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        layers: dict[str, dict[str, Path]] = {}
        for key, name in files.items():
            layer = _LAYER.match(key)
            layers.setdefault(layer[0] if layer else key, {})[key] = self._directory / name
        return layers

    def _load(self, keys: Mapping[str, Path], rules: Any) -> Any:
        """Load tensors of the files into the other model, and return Transformers' report."""
        options: Any = {"device_map": {"": "cpu"}, "dtype": torch.float32}
        config = LoadStateDictConfig(**options, weight_mapping=rules)
        with ExitStack() as stack:
            opened = {path: safe_open(path, framework="pt") for path in set(keys.values())}
            files: dict[Path, Any] = {p: stack.enter_context(f) for p, f in opened.items()}
            slices = {key: files[path].get_slice(key) for key, path in keys.items()}
            return convert_and_load_state_dict_in_model(self._plain, slices, config)[0]


def _not_by_rows(rule: Any) -> str:
    """Return the fault of a used conversion rule that does not keep rows."""
    if not isinstance(rule, WeightConverter) or not rule.was_used():
        return ""
    first, *rest = rule.operations
    stacked = isinstance(first, MergeModulelist) and first.dim == 0
    if stacked and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest):
        return ""
    return f"{', '.join(rule.source_patterns)} can't be read by rows: set trainer.ranks = 1"


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    holder = model.get_submodule(module)
    if attribute in holder._parameters:
        tensor = nn.Parameter(tensor, requires_grad=False)
    setattr(holder, attribute, tensor)


def _tied(model: nn.Module) -> Iterable[list[str]]:
    """Return the names of each tensor of a state dict; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names.values()


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute all buffers as the class does."""
    for name, buffer in list(model.named_buffers()):
        _put(model, name, torch.empty_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if "_is_hf_initialized" in vars(module):
            del module._is_hf_initialized
    model.initialize_weights()
