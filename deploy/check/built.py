"""Counts of a model that is built without weights, which brings torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from umbra.deploy.check.counts import Build, Counts
from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import attention_implementation, decoder_layers
from umbra.services.modeling.pretrained import loading, read_transformers_config


def count(build: Build) -> Counts:
    """Return the counts of a model in a directory, with the adapter that its trainer puts in.

    Raises:
        UsageError: it cannot be built, or has no such layers.
    """
    directory = Path(build.directory)
    with loading(directory, build.source):
        return count_of(read_transformers_config(directory), build.trainer)


def count_of(model_config: Any, trainer: TrainerConfig) -> Counts:
    """Return `count` of the model that Transformers makes by its config."""
    attention = attention_implementation(model_config)
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
        size = parameter.numel()
        own = counts.setdefault(places.get(id(parameter), -1), [0, 0])
        own[0] += size
        own[1] += size * parameter.requires_grad
        adapter += size * (".lora_" in name)
        largest = max(largest, size)
    parameters, trained = map(sum, zip(*counts.values(), strict=True))
    outside = counts.pop(-1)
    layer = max(counts.values(), default=[0, 0])
    return Counts(
        parameters=parameters - adapter,
        adapter=adapter,
        trained=trained,
        outside=(outside[0], outside[1]),
        layer=(layer[0], layer[1]),
        largest=largest,
        eager=attention == "eager",
    )
