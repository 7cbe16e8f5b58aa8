"""The experts of a mixture: which ones a token meets, and ranks that divide them.

Choices are noted, counted, balanced by a loss, or replaced by the generator's (`Routers`). Ranks
divide experts as in GShard (arXiv 2006.16668): each of N has 1/N of the experts of every layer,
routes its own tokens, sends each to the ranks that have its experts, and sums the results with its
router's weights. The backward pass exchanges in the same way, so a rank finds what the tokens of
all N add to the gradients of its experts (`divide_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from umbra.proto.bounds import ROUTING_BYTES
from umbra.proto.errors import UsageError
from umbra.proto.records import Trajectory, routing_bytes

NO_BALANCE = (
    "trainer.router_aux_loss_coef: Transformers knows no such loss for the model in model.path: "
    "leave it out"
)
NO_ROUTERS = (
    "trainer.router_replay: the model in model.path has no routers whose choice could be replayed: "
    "set it to false"
)
UNKNOWN = -1  # in place of an expert: the router chooses itself


class Routers:
    """The L routers of `model`, in the order of its layers; each gives a token k of E experts.

    With replay, weights of the chosen experts are those that the router's own class makes of its
    scores for them, and have gradients: only its `topk` answers something else (arXiv 2510.11370).
    Settings for the next pass hold for its recomputation in the backward pass too. Raises
    UsageError for routers that differ from layer to layer.
    """

    replay: Tensor | None = None
    """int16 [n, L, k], experts of the next pass's n tokens; `UNKNOWN`: the router chooses."""
    noted: list[Tensor] | None = None
    """The chosen experts of the last pass [n, k], layer by layer; None: they are not noted."""
    counted: Tensor | None = None
    """bool [n], the tokens of a pass that count in `load`; None: none of them."""
    load: Tensor | None = None
    """int64 [L, E + 1], how many tokens each expert was given, and, in the last column, how often
    the router would have chosen another one than it had to."""
    balance: Tensor | None = None
    """float [n], the weight of each token of the next pass in the loss that balances the experts,
    whose gradients the backward pass adds."""

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of `model`, always the same; None where Transformers names none."""
        named = _named_routers(model)
        for router in named.values():
            if isinstance(router.forward, _RouterForward):
                return router.forward.routers
        return cls(named) if named else None

    def __init__(self, named: dict[str, Any]) -> None:
        kinds = {(router.top_k, router.num_experts) for router in named.values()}
        if len(kinds) > 1:
            raise UsageError("model.path: its layers have different numbers of experts")
        self.layers = len(named)
        self.choices, self.experts = kinds.pop()
        self.kind = (self.layers, self.choices, self.experts)
        self.places = [int(_LAYER.findall(name)[0]) for name in named]  # layers with a router
        for layer, router in enumerate(named.values()):
            router.forward = _RouterForward(self, layer, router)

    def route(self, layer: int, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """Run a router on hidden states [n, H]; UsageError if its choice can't be replaced."""
        choice: Tensor | None = None
        if self.replay is None:
            result = forward(hidden)
        else:
            with _TopK(self.replay[:, layer].to(hidden.device), self.experts) as answered:
                result = forward(hidden)
            choice = answered.own
            if result[2] is not answered.chosen:
                raise UsageError(
                    "trainer.router_replay: the routers of this model do not choose by topk, so "
                    "they can't be told what to choose: set it to false"
                )
        if self.balance is not None and torch.is_grad_enabled():
            loss = balance_loss(result[0], result[2], self.balance.to(hidden.device))
            result = (result[0], _WithLoss.apply(result[1], loss / self.layers), result[2])
        if self.noted is not None:
            self.noted.append(result[2])
        if self.counted is not None:
            self._count(layer, self.counted, result[2], result[2] if choice is None else choice)
        return result

    @torch.no_grad()
    def _count(self, layer: int, counted: Tensor, chosen: Tensor, choice: Tensor) -> None:
        if self.load is None:
            self.load = self._no_load(chosen.device)
        rerouted = (chosen[:, :, None] != choice[:, None, :]).all(-1)  # [n, k]
        weight = counted.to(self.load)[:, None].expand_as(chosen).flatten()
        self.load[layer].index_add_(0, chosen.flatten(), weight)
        self.load[layer, -1] += (rerouted.flatten() * weight).sum()

    def take_load(self) -> Tensor:
        load, self.load = self.load, None
        return self._no_load() if load is None else load.cpu()

    def _no_load(self, device: torch.device | None = None) -> Tensor:
        return torch.zeros(self.layers, self.experts + 1, dtype=torch.int64, device=device)


@dataclass
class _RouterForward:
    """In the place of a router's `forward`; a copy of the model has its own."""

    routers: Routers
    layer: int
    router: Any

    @torch.compiler.disable  # compiled layers break here: the routing changes from pass to pass
    def __call__(self, hidden: Tensor, *more: Any) -> Any:
        forward = partial(type(self.router).forward, self.router)
        return self.routers.route(self.layer, lambda states: forward(states, *more), hidden)


def check_routing_fits(kind: tuple[int, int, int], max_context: int) -> None:
    """Raise UsageError if no message would take a sequence's routing of `kind` (of `Routers`)."""
    size = routing_bytes(*kind)
    if size * max_context > ROUTING_BYTES:
        raise UsageError(
            f"trainer.router_replay: a token of this model has {size} bytes of routing, so a "
            f"sequence can have {ROUTING_BYTES // size:,} tokens at most: lower "
            f"generator.max_context, which is {max_context:,}, or set router_replay to false"
        )


def chosen_experts(trajectory: Trajectory) -> NDArray[np.integer[Any]]:
    """Return the routing of a trajectory that has one, [R, layers, choices]."""
    routing = trajectory.routing
    assert routing is not None
    kind = "u1" if routing.experts <= 256 else "<u2"
    return np.frombuffer(routing.chosen, kind).reshape(-1, routing.layers, routing.choices)


def balance_loss(logits: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of one layer that is least where all experts are used alike.

    E sum_e f_e P_e: f_e is the mean over tokens of how often expert e was chosen, P_e of its
    softmax probability (arXiv 2101.03961, eq. 4; with k choices for one as Transformers has it).
    Logits are [n, E], choices [n, k]; `weight` [n] weighs a token in the means and the loss.
    """
    weight = weight.float()
    experts = logits.shape[-1]
    usage = torch.zeros(experts, device=weight.device)
    usage.index_add_(0, chosen.flatten(), weight[:, None].expand_as(chosen).flatten())
    total = weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
    probable = (logits.float().softmax(-1) * weight[:, None]).sum(0)
    return experts * (usage * probable).sum() / total


class _WithLoss(torch.autograd.Function):
    """The identity, whose backward pass goes through a loss as well.

    So the loss needs no way out of the layer, which may be sharded, or computed once more.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], torch.ones((), device=gradients[0].device)


class _TopK(TorchFunctionMode):
    """Inside, the `topk` that picks the experts of all tokens answers those that are `told` [n, k].

    Another `topk`, over groups of experts, say, has another shape.
    """

    def __init__(self, told: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen: Tensor | None = None  # int64 [n, k]
        self.own: Tensor = told  # int64 [n, k], without being told
        self._told = told
        self._scores = (told.shape[0], experts)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        picks = func in (torch.topk, Tensor.topk) and tuple(args[0].shape) == self._scores
        if not picks or result.indices.shape != self._told.shape:
            return result
        known = self._told != UNKNOWN
        self.own = result.indices
        self.chosen = torch.where(known, self._told.long(), result.indices)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


_LAYER = re.compile(r"\.(\d+)\.")


def _named_routers(model: nn.Module) -> dict[str, Any]:
    """Return the modules that Transformers takes `router_logits` from, by name."""
    kinds: set[type] = set()
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        recorder = recorded.get("router_logits")
        if recorder is not None and getattr(recorder, "index", 0) == 0:  # logits, weights, choice
            kinds.add(getattr(recorder, "target_class", recorder))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and hasattr(module, "top_k") and hasattr(module, "num_experts")
    }


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
    Raises UsageError if the experts have adapters, or can't be divided evenly.
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
        for attribute, parameter in list(experts.named_parameters()):
            if len(parameter) != experts.num_experts or len(parameter) % group.size:
                raise UsageError(
                    f"trainer.expert_parallel = {group.size} cannot divide {name}.{attribute} "
                    f"{list(parameter.shape)} of {type(model).__name__}: set it to 1"
                )
            part = parameter.detach().chunk(group.size)[group.rank].clone()
            tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(experts, attribute, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        experts.forward = _ExpertForward(group, experts)
        divided.append(experts)
    return divided


@dataclass
class _ExpertForward:
    """In the place of the `forward` of a layer's experts, of which some are here."""

    group: ExpertGroup
    experts: Any

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, as Transformers defines it.

        Hidden states are [n, H], indices (of all experts) and weights [n, k].
        """
        group, experts = self.group, SeenExperts(self.experts, self.group.size)
        choices = top_k_index.shape[1]
        chosen, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self.experts.num_experts).view(group.size, -1)
        arrivals = torch.empty_like(counts)  # tokens from each rank for each expert that is here
        dist.all_to_all_single(arrivals, counts, group=group.group)
        # One wait for the device instead of two.
        send, receive = torch.stack([counts.sum(1), arrivals.sum(1)]).tolist()
        dtype = next(self.experts.parameters()).dtype
        tokens = hidden_states[order // choices].to(dtype)
        received = all_to_all_single_autograd(tokens, receive, send, group.group)
        results = experts.compute(received, arrivals).contiguous()
        returned = all_to_all_single_autograd(results, send, receive, group.group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        chosen_results = returned[back].view(-1, choices, returned.shape[1])
        return (chosen_results * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class SeenExperts:
    """Experts as the `forward` of their class sees them: those that are here, in autocast's dtype.

    It leaves their products out: with float32 weights they would be float32 on a GPU, one expert
    after the other (torch 2.13).
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
