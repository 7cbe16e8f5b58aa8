"""The model that is compared: as it is, or a copy with few layers and short windows."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from umbra.services.modeling.models import AS_IT_IS, loading, read_transformers_config, read_weights

LARGE = 300_000_000  # numbers; a copy is made of larger models
WINDOW = 16  # tokens; the sequences that are compared are longer


class Subject(NamedTuple):
    """A model directory, Transformers' config of it, and what a copy lacks."""

    directory: Path
    config: PreTrainedConfig
    cuts: Sequence[str]


def take(original: Path, scratch: Path, layers: int, checked: Collection[str]) -> Subject:
    """The model in `original`, or a copy of it below `scratch`.

    Args:
        layers: keep the first so many; 0 = all, or as few as have every kind of layer where the
            model is `LARGE`.
        checked: see `check_architecture`.

    Raises:
        UsageError: it cannot be loaded.
    """
    with loading(original, "PATH"):
        config = read_transformers_config(original)
    count: int = config.num_hidden_layers
    fewest = fewest_layers(config)
    kept = min(count, max(layers, fewest) if layers else count)
    if not layers and _size(original) > LARGE:
        kept = min(count, fewest)
    window = getattr(config, "sliding_window", None) or 0
    cuts: list[str] = []
    if kept < count:
        cuts.append(f"the first {kept} of {count} layers")
    if window > WINDOW:
        cuts.append(f"windows of {WINDOW} tokens instead of {window}")
    if not cuts:
        return Subject(original, config, cuts)
    copy = scratch / "copy"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text(json.dumps(_cut(config, kept)), encoding="utf-8")
    with loading(original, "PATH"):
        smaller = read_transformers_config(copy)
        model = read_weights(
            AutoModelForCausalLM, original, torch.float32, "PATH", checked, config=smaller
        )
        model.save_pretrained(copy)
        tokenizer = AutoTokenizer.from_pretrained(original, **AS_IT_IS)
        tokenizer.save_pretrained(copy)
    return Subject(copy, smaller, cuts)


def fewest_layers(config: PreTrainedConfig) -> int:
    """How many of the first layers have every kind of layer that there is, at least 2.

    Kinds of attention don't count: `_cut` gives the copy all of them.
    """
    fields, count = config.to_dict(), config.num_hidden_layers
    fewest = max(2, len(set(getattr(config, "layer_types", None) or ())))
    fewest = max(fewest, int(fields.get("first_k_dense_replace") or 0) + 1)
    for key, values in fields.items():
        if key != "layer_types" and isinstance(values, list) and len(values) == count:
            fewest = max(fewest, *(values.index(value) + 1 for value in values))
    return min(count, fewest)


def _cut(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Return the config's fields with so many layers, kinds of attention in turn."""
    fields, count = config.to_dict(), config.num_hidden_layers
    for key, values in fields.items():
        if isinstance(values, list) and len(values) == count:
            fields[key] = values[:layers]
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or ())):
        fields["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    fields["num_hidden_layers"] = layers
    if (fields.get("sliding_window") or 0) > WINDOW:
        fields["sliding_window"] = WINDOW
    return fields


def _size(directory: Path) -> int:
    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                shape = torch.Size(opened.get_slice(name).get_shape())
                total += shape.numel()
    return total
