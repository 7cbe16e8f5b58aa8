"""float32 copies of the trained parameters, where the optimizer can't work on these themselves.

A step adds to a weight less than bfloat16 can tell from nothing, so the optimizer of bf16 weights
updates float32 copies and rounds them back. The same copies serve an optimizer on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Masters:
    """What an optimizer updates: a float32 copy of each of `parameters`, sharded like it.

    Args:
        parameters: those that are trained.
        device: of the copies; None: there are none, and the optimizer updates the parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device | None) -> None:
        self._trained = list(parameters)
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        if device is not None:
            for parameter in self._trained:
                copy = parameter.detach().to(device, torch.float32, copy=True)
                self._copies[parameter] = nn.Parameter(copy)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is updated."""
        return [self.of(parameter) for parameter in self._trained]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy of a parameter, or itself."""
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the parameters to those of the copies, in float32."""
        for parameter, copy in self._copies.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(copy_device(copy), torch.float32)
            if copy.grad is None:
                copy.grad = gradient
            else:
                copy.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def push(self) -> None:
        """Round the copies to the parameters."""
        for parameter, copy in self._copies.items():
            local(parameter).copy_(local(copy))


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is here, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_device(tensor: Tensor) -> torch.device:
    """Where the bytes of a tensor are; a sharded one names the device of its mesh."""
    return local(tensor).device


def rows_like(tensor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Zeros [rows of `tensor`, ...], sharded by rows as it is, on its device."""
    whole = torch.Size(shape)
    device = copy_device(tensor)
    if not isinstance(tensor, DTensor):
        return torch.zeros(whole, dtype=dtype, device=device)
    held = torch.zeros(len(tensor.to_local()), *whole[1:], dtype=dtype, device=device)
    stride = torch.empty(whole, device="meta").stride()
    made = DTensor.from_local(
        held, tensor.device_mesh, tensor.placements, run_check=False, shape=whole, stride=stride
    )
    return made.to(device)
