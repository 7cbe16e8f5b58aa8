"""The routers of a mixture of experts: which experts its tokens meet is noted, counted, or told."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
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

    Attributes:
        places: the model's layers that have a router.
        replay: int16 [n, L, k], experts for the n tokens of the next pass, and of its recomputation
            in the backward pass; `UNKNOWN` where the router chooses itself.
        noted: the chosen experts of the last pass [n, k], layer by layer; None: they are not noted.
        counted: bool [n], the tokens of a pass that count in `load`; None: none of them.
        load: int64 [L, E + 1], how many tokens each expert was given, and, in the last column, how
            often the router would have chosen another one than it had to.
        balance: float [n], the weight of each token of the next pass, and of its recomputation, in
            the loss that balances the experts, whose gradients the backward pass adds.

    Raises:
        UsageError: routers that differ from layer to layer.
    """

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of `model`, always the same; None where Transformers names none."""
        named = _named_routers(model)
        for router in named.values():
            if isinstance(router.forward, _Forward):
                return router.forward.routers
        return cls(named) if named else None

    def __init__(self, named: dict[str, Any]) -> None:
        kinds = {(router.top_k, router.num_experts) for router in named.values()}
        if len(kinds) > 1:
            raise UsageError("model.path: its layers have different numbers of experts")
        self.layers = len(named)
        self.choices, self.experts = kinds.pop()
        self.places = [int(_LAYER.findall(name)[0]) for name in named]
        self.replay: Tensor | None = None
        self.noted: list[Tensor] | None = None
        self.counted: Tensor | None = None
        self.load: Tensor | None = None
        self.balance: Tensor | None = None
        for layer, router in enumerate(named.values()):
            router.forward = _Forward(self, layer, router)

    @property
    def kind(self) -> tuple[int, int, int]:
        return self.layers, self.choices, self.experts

    def route(self, layer: int, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """Run the router of `layer` on hidden states [n, H], by the `forward` of its class.

        Raises:
            UsageError: its choice can't be replaced.
        """
        own: Tensor | None = None
        if self.replay is None:
            found = forward(hidden)
        else:
            with _TopK(self.replay[:, layer].to(hidden.device), self.experts) as answered:
                found = forward(hidden)
            own = answered.own
            if found[2] is not answered.chosen:
                raise UsageError(
                    "trainer.router_replay: the routers of this model do not choose by topk, so "
                    "they can't be told what to choose: set it to false"
                )
        if self.balance is not None and torch.is_grad_enabled():
            loss = balance_loss(found[0], found[2], self.balance.to(hidden.device))
            found = (found[0], _WithLoss.apply(found[1], loss / self.layers), found[2])
        if self.noted is not None:
            self.noted.append(found[2])
        if self.counted is not None:
            self._count(layer, self.counted, found[2], found[2] if own is None else own)
        return found

    @torch.no_grad()
    def _count(self, layer: int, counted: Tensor, chosen: Tensor, own: Tensor) -> None:
        if self.load is None:
            zeros = (self.layers, self.experts + 1)
            self.load = torch.zeros(zeros, dtype=torch.int64, device=chosen.device)
        other = (chosen[:, :, None] != own[:, None, :]).all(-1)  # [n, k]
        weight = counted.to(self.load)[:, None].expand_as(chosen).flatten()
        self.load[layer].index_add_(0, chosen.flatten(), weight)
        self.load[layer, -1] += (other.flatten() * weight).sum()

    def take_load(self) -> Tensor:
        load, self.load = self.load, None
        if load is None:
            return torch.zeros(self.layers, self.experts + 1, dtype=torch.int64)
        return load.cpu()


@dataclass
class _Forward:
    """In the place of a router's `forward`; a copy of the model has its own."""

    routers: Routers
    layer: int
    router: Any

    @torch.compiler.disable  # compiled layers break here: the routing changes from pass to pass
    def __call__(self, hidden: Tensor, *more: Any) -> Any:
        own = partial(type(self.router).forward, self.router)
        return self.routers.route(self.layer, lambda states: own(states, *more), hidden)


def check_routing_fits(kind: tuple[int, int, int], max_context: int) -> None:
    """Refuse sequences whose routing no message would take; `kind` is as of `Routers`.

    Raises:
        UsageError: the longest one is too long.
    """
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
    used = torch.zeros(experts, device=weight.device)
    used.index_add_(0, chosen.flatten(), weight[:, None].expand_as(chosen).flatten())
    total = weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
    probable = (logits.float().softmax(-1) * weight[:, None]).sum(0)
    return experts * (used * probable).sum() / total


class _WithLoss(torch.autograd.Function):
    """The identity, whose backward pass goes through a loss as well.

    So the loss needs no way out of the layer, which may be sharded, or computed once more.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient, torch.ones((), device=gradient.device)


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
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or tuple(args[0].shape) != self._scores:
            return found
        if found.indices.shape != self._told.shape:
            return found
        known = self._told != UNKNOWN
        self.own = found.indices
        self.chosen = torch.where(known, self._told.long(), found.indices)
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
