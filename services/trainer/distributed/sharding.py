"""Layers of a policy compiled, recomputed in the backward pass, and sharded over the ranks.

Accelerate shards by FSDP2 only where there are GPUs and falls back to copies (DDP) elsewhere, so
`fully_shard` is called here: the path that the tests run on a CPU is the one that runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from umbra.services.config import TrainerConfig
from umbra.services.modeling.experts import SeenExperts, divide_experts
from umbra.services.modeling.models import decoder_layers
from umbra.services.modeling.sharded import local
from umbra.services.trainer.distributed.ranks import Ranks

_ATEN = torch.ops.aten
# What selective recomputation keeps: linear layers, experts, and attention that keeps no scores.
# Not `bmm`: attention that does keep scores makes them with it, the square of the row's length.
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._grouped_mm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
]


def prepare_layers(model: PreTrainedModel, config: TrainerConfig, kind: str) -> None:
    """Compile, recompute and offload layers as configured; names stay as they are.

    `kind` is the device's, "cpu" or "cuda".
    """
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):  # what Transformers marks experts by
            module.forward = partial(type(module).forward, SeenExperts(module))
    mode = config.recomputes_on(kind)
    if not (config.compile or mode):
        return
    keep = {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)}
    options = keep if mode == "selective" else {}
    for layer in decoder_layers(model):
        if config.compile:
            # By layers: they are all alike, so one is compiled and the others reuse it.
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if mode:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
            if config.offload == "all":
                layer.forward = _kept_on_host(layer.forward)


def _kept_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` that keeps tensors for the backward pass (a layer's input) on the host."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run


def shard(
    model: PreTrainedModel,
    device: torch.device,
    ranks: Ranks,
    config: TrainerConfig,
    root: nn.Module | None = None,
) -> None:
    """Divide the rows of every parameter over `ranks` (FSDP2, ZeRO 3), layer by layer.

    `root` is what runs `model`, if that is another module. Where `ranks` divide experts, the rows
    of those that a rank has are divided over the ranks that have the same ones.

    Raises:
        UsageError: experts can't be divided.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision_on(device.type) == "bf16" else None,
        reduce_dtype=torch.float32,
    )
    mesh, offload = init_device_mesh(device.type, (ranks.world,)), OffloadPolicy()
    if config.offload == "all":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if ranks.experts is not None:
        meshes = ranks.experts.mesh(device.type)
        replicas = meshes["alike"]
        for experts in divide_experts(model, ranks.experts, meshes["experts"]):
            module: Any = fully_shard(
                experts,
                mesh=replicas,
                # What it is given stays as it is where FSDP gathers whole layers.
                mp_policy=replace(policy, cast_forward_inputs=False),
                offload_policy=offload,
                reshard_after_forward=True,
            )
            # Each has the tokens of all ranks of its group, so the mean over `alike` is over all.
            module.set_gradient_divide_factor(float(ranks.world))
            if replicas.size() > 1:  # gloo sums only
                module.set_force_sum_reduction_for_comms(True)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    for layer in decoder_layers(model):
        fully_shard(layer, **options, reshard_after_forward=True)
    fully_shard(root or model, **options)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: the root keeps its own after a pass without a backward one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], limit: float, ranks: Ranks) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `limit`; return the norm before.

    Of sharded parameters, each number of a gradient is on one rank alone, over whichever ranks they
    are sharded; so where experts are over others, the norm is summed over all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    meshes = {g.device_mesh if isinstance(g, DTensor) else None for g in gradients}
    if len(meshes) < 2:
        norm = clip_grad_norm_(parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    assert None not in meshes, "all are sharded, or none"
    local_gradients = [local(gradient) for gradient in gradients]
    squares = get_total_norm(local_gradients).double().square()
    norm = ranks.sum_ranks(squares.cpu()).sqrt().float()
    factor = float((limit / (norm + 1e-6)).clamp(max=1.0))  # as torch's
    for gradient in local_gradients:
        gradient.mul_(factor)
    return norm
