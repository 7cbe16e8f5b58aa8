"""Layers of a policy compiled, recomputed in the backward pass, and sharded over the ranks.

Accelerate shards by FSDP2 only where there are GPUs and falls back to copies (DDP) elsewhere, so
`fully_shard` is called here: the path that the tests run on a CPU is the one that runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.runtime.config import TrainerConfig
from umbra.services.trainer.ranks import Ranks


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of `model`, as its class names them.

    Raises:
        UsageError: the class names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UsageError(
            f"model.path: {type(model).__name__} does not say what its layers are, so it can "
            "neither be sharded nor compiled nor recomputed by layers"
        )
    return layers


def prepare_layers(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Compile, recompute and offload layers as configured; names stay as they are."""
    saved = config.offload in ("activations", "all")
    if not (config.compile or config.activation_checkpointing or saved):
        return
    for layer in decoder_layers(model):
        if config.compile:
            # By layers: they are all alike, so one is compiled and the others reuse it.
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if config.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if saved:
            layer.forward = _saved_on_host(layer.forward)


def _saved_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, what it keeps for the backward pass being in host memory until then.

    Of a layer that is recomputed that is its input.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run


def offloaded(config: TrainerConfig) -> bool:
    """Whether FSDP keeps the ranks' rows of parameters and gradients in host memory."""
    return config.offload == "all"


def shard(
    model: PreTrainedModel,
    device: torch.device,
    ranks: Ranks,
    config: TrainerConfig,
    root: nn.Module | None = None,
) -> None:
    """Divide the rows of every parameter over `ranks` (FSDP2, ZeRO 3), layer by layer.

    Gradients are reduced in float32, whatever the compute dtype. `root` is what runs `model`, if
    that is another module.
    """
    if ranks.group is None:
        mesh = init_device_mesh(device.type, (ranks.world,))
    else:
        mesh = DeviceMesh.from_group(ranks.group, device.type)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        reduce_dtype=torch.float32,
    )
    offload = OffloadPolicy()
    if offloaded(config):
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
        )
    fully_shard(root or model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: the root keeps its own after a pass without a backward one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
