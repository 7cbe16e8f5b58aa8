"""Experts divided over ranks (GShard, arXiv 2006.16668): tokens travel to them, results come back.

Each of N ranks has 1/N of the experts of every layer. A rank routes its own tokens, sends each to
the ranks that have its experts, and sums the results with the weights of its router. The backward
pass exchanges in the same way, so a rank finds what the tokens of all N add to the gradients of its
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from umbra.proto.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The `size` ranks that divide the experts of each layer; this is number `rank` of them.

    `alike` are the ranks that have the same experts as this one, one of each such group.
    """

    group: dist.ProcessGroup
    alike: dist.ProcessGroup
    rank: int
    size: int

    def mesh(self, kind: str) -> DeviceMesh:
        """Return all ranks on devices of this kind, by their place in `alike` and in `group`."""
        ranks = dist.get_world_size(self.alike) * self.size
        return DeviceMesh.from_group(
            [self.alike, self.group],
            kind,
            mesh=torch.arange(ranks).view(-1, self.size),
            mesh_dim_names=("alike", "experts"),
        )


def divide_experts(model: nn.Module, group: ExpertGroup, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave each rank of `group` its experts of each layer; return the modules that had all.

    Their parameters are DTensors afterwards, `Shard(0)` on `mesh`, which has the ranks of `group`.

    Raises:
        UsageError: the experts have adapters, or can't be divided evenly.
    """
    divided: list[nn.Module] = []
    for name, module in model.named_modules():
        if not hasattr(module, "_is_expert_parallel"):  # what Transformers marks them by
            continue
        if name.endswith(".base_layer"):
            raise UsageError(
                "trainer.expert_parallel does not divide adapters of experts: name other layers in "
                "trainer.lora_targets, as q_proj and v_proj, or set it to 1"
            )
        experts: Any = module
        for own, parameter in list(experts.named_parameters()):
            if len(parameter) != experts.num_experts or len(parameter) % group.size:
                raise UsageError(
                    f"trainer.expert_parallel = {group.size} cannot divide {name}.{own} "
                    f"{list(parameter.shape)} of {type(model).__name__}: set it to 1"
                )
            part = parameter.detach().chunk(group.size)[group.rank].clone()
            made = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(experts, own, nn.Parameter(made, requires_grad=parameter.requires_grad))
        experts.forward = _Forward(group, experts)
        divided.append(experts)
    return divided


@dataclass
class _Forward:
    """In the place of the `forward` of a layer's experts, of which some are here."""

    group: ExpertGroup
    experts: Any

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, as Transformers defines it.

        Hidden states are [n, H], indices (of all experts) and weights [n, k].
        """
        group, own = self.group, SeenExperts(self.experts, self.group.size)
        choices = top_k_index.shape[1]
        chosen, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self.experts.num_experts).view(group.size, -1)
        come = torch.empty_like(counts)  # tokens from each rank for each expert that is here
        dist.all_to_all_single(come, counts, group=group.group)
        # One wait for the device instead of two.
        send, receive = torch.stack([counts.sum(1), come.sum(1)]).tolist()
        dtype = next(self.experts.parameters()).dtype
        tokens = hidden_states[order // choices].to(dtype)
        received = all_to_all_single_autograd(tokens, receive, send, group.group)
        results = own.compute(received, come).contiguous()
        returned = all_to_all_single_autograd(results, send, receive, group.group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        chosen_results = returned[back].view(-1, choices, returned.shape[1])
        return (chosen_results * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class SeenExperts:
    """Experts as the `forward` of their class sees them: `self`.

    Those that are here, and in the dtype of autocast, which leaves their products out: with float32
    weights they would be float32 on a GPU, one expert after the other (torch 2.13).
    """

    def __init__(self, experts: Any, ranks: int = 1) -> None:
        self._experts = experts
        self.num_experts: int = experts.num_experts // ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        value = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(value, Tensor) and torch.is_autocast_enabled(value.device.type):
            return value.to(torch.get_autocast_dtype(value.device.type))
        return value

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs [m, H] for tokens [m, H], ordered by source rank and expert.

        `counts` of them are int64 [ranks, experts that are here].
        """
        count = len(tokens)
        experts = torch.arange(self.num_experts, device=tokens.device).repeat(len(counts))
        index = experts.repeat_interleave(counts.flatten(), output_size=count)
        if not count:
            # Gradients are exchanged and summed over ranks, so there must be some: zeros.
            tokens, index = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), experts[:1]
        forward: Any = type(self._experts).forward
        weights = tokens.new_ones(len(tokens), 1)  # the tokens' own rank has the router's weights
        return forward(self, tokens, index.unsqueeze(1), weights)[:count]
