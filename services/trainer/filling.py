"""Parameters from the meta device to where they are trained: each rank reads the rows it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from umbra.services.trainer.lora import is_adapter
from umbra.services.trainer.snapshot import bare_name, held_rows


class RowSource(Protocol):
    """Where the rows of a model's weights come from."""

    def read(self, name: str, place: Tensor, first: int = 0) -> None:
        """Copy rows `[first, first + len(place))` of parameter `name` to `place`."""
        ...


class HeldWeights:
    """Weights that are in memory already."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def read(self, name: str, place: Tensor, first: int = 0) -> None:
        whole = self._weights[name]
        place.copy_(whole if whole.dim() == 0 else whole[first : first + len(place)])


def held(model: nn.Module) -> HeldWeights:
    """The weights that `model` has now."""
    return HeldWeights({name: p.detach() for name, p in model.named_parameters()})


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters another dtype; buffers stay as they are, and tied weights tied."""
    _replace(model, lambda p: nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad))


def place(model: nn.Module, device: torch.device, *, parameters_at: torch.device) -> None:
    """Bring `model`, sharded or not, to its devices; what was on the meta device has no values yet.

    Args:
        model: after `shard`, if it is.
        device: of the buffers.
        parameters_at: the device of the parameters, or of this rank's rows of them.
    """
    names = _names(model)

    def moved(tensor: Tensor) -> Tensor:
        where = parameters_at if isinstance(tensor, nn.Parameter) else device
        if tensor.is_meta:
            return torch.empty_like(tensor, device=where)
        return tensor.to(where)

    model._apply(moved)
    _tie(model, names)


@torch.no_grad()
def read(
    model: nn.Module, source: RowSource, into: Callable[[nn.Parameter], Tensor] = lambda p: p
) -> None:
    """Read the rows that are held here of every weight; adapters have theirs.

    Besides these a rank needs the memory of its rows of one tensor.

    Args:
        model: placed.
        source: has the weights by the model's names.
        into: what of a parameter is to be filled, sharded like it.

    Raises:
        UsageError: a file cannot be read, or is of another model.
    """
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        tensor = into(parameter).detach()
        rows, first = held_rows(name, tensor)
        source.read(bare_name(name), rows, first)


def _names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter; those that are tied have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _tie(model: nn.Module, names: list[list[str]]) -> None:
    """Have one parameter under all names that belonged to one."""
    for first, *others in names:
        for other in others:
            _set(model, other, model.get_parameter(first))


def _replace(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    for names in _names(model):
        made = make(model.get_parameter(names[0]))
        for name in names:
            _set(model, name, made)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, parameter)
