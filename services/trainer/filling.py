"""Parameters from the meta device to where they are trained: each rank reads the rows it holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbra.services.modeling.weight_files import WeightFiles
from umbra.services.trainer.snapshot import bare_name, own_rows


def fill(
    model: nn.Module,
    device: torch.device,
    files: WeightFiles | None,
    part: nn.Module | None = None,
) -> None:
    """Bring `model`, sharded or not, to `device`, with the values that `files` has.

    Besides what is held afterwards a rank needs the memory of its rows of one tensor.

    Args:
        model: some parameters may be on the meta device.
        device: where to.
        files: None if no parameter is on the meta device.
        part: the module that `files` names the parameters of, if it is not all of `model`.

    Raises:
        UsageError: a file cannot be read.
    """
    part = part or model
    missing = [name for name, parameter in part.named_parameters() if parameter.is_meta]
    _place(model, device)
    if files is None:
        return
    parameters = dict(part.named_parameters())
    for name in missing:
        place, first = _held(name, parameters[name])
        files.read(bare_name(name), place, first)


def _held(name: str, parameter: Tensor) -> tuple[Tensor, int]:
    """The rows of a parameter that are here, and the number of the first one."""
    if isinstance(parameter, DTensor):
        return own_rows(name, parameter, 0, 1)  # its mesh says which rank this is
    return parameter.detach(), 0


def _place(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)`, and memory for what is on the meta device; tied weights stay tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor.to(device)

    model._apply(moved)
    for first, *others in names.values():
        for other in others:
            module, _, own = other.rpartition(".")
            setattr(model.get_submodule(module), own, model.get_parameter(first))
