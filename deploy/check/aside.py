"""Checks that need torch, in their own process: `python -m umbra.deploy.check.aside`.

A driver that is out of order may hang or end whoever asks it, and torch takes half a GiB. Prints as
JSON the GPUs that torch sees; of a request on standard input the choice, or the counts of a model
that is built without weights.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from umbra.deploy.check.choose import ChoiceRequest, for_hardware
from umbra.deploy.check.machine import Gpu, GpuReport
from umbra.deploy.check.model_sizes import Build, Counts
from umbra.proto.errors import UmbraError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import attention_implementation, decoder_layers
from umbra.services.modeling.pretrained import loading, read_transformers_config


def count(build: Build) -> Counts:
    """Return a model's counts with the adapter of its trainer; UsageError if it can't be built."""
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
    places = {id(p): i for i, m in enumerate(decoder_layers(model)) for p in m.parameters()}
    counts: dict[int, list[int]] = {-1: [0, 0]}  # by layer, -1 is outside of them: all, trained
    adapter = largest = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        layer_counts = counts.setdefault(places.get(id(parameter), -1), [0, 0])
        layer_counts[0] += size
        layer_counts[1] += size * parameter.requires_grad
        adapter += size * (".lora_" in name)
        largest = max(largest, size)
    parameters, trained = map(sum, zip(*counts.values(), strict=True))
    outside, outside_trained = counts.pop(-1)
    layer, layer_trained = max(counts.values(), default=[0, 0])
    return Counts(
        parameters=parameters - adapter,
        adapter=adapter,
        trained=trained,
        outside=(outside, outside_trained),
        layer=(layer, layer_trained),
        largest=largest,
        eager=attention == "eager",
    )


CPU_S = 180  # of processor time, torch's import included: a large model takes some 30


def look() -> GpuReport:
    if not torch.cuda.is_available():
        why_not = "there is none" if torch.version.cuda else "this torch is built without CUDA"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why_not = str(error).partition("\n")[0]
        node = any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))  # dxg: of WSL
        version, visible = str(torch.__version__), os.environ.get("CUDA_VISIBLE_DEVICES")
        return GpuReport([], why_not, version, torch.version.cuda or "", node, visible)
    devices = range(torch.cuda.device_count())
    sizes = [(torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)) for i in devices]
    return GpuReport([Gpu(name, total, free) for name, (free, total) in sizes])


if __name__ == "__main__":
    if data := sys.stdin.buffer.read():
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))  # the clock counts others' work too
        request = msgspec.json.decode(data, type=ChoiceRequest | Build)
        try:
            builds = isinstance(request, Build)
            answer = count(request) if builds else for_hardware(*msgspec.structs.astuple(request))
        except UmbraError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
    else:
        answer = look()
    sys.stdout.buffer.write(msgspec.json.encode(answer))
