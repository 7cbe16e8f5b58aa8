"""The optimizer, and the float32 master weights that it updates.

Updates underflow in bfloat16, so the optimizer of bf16 weights updates float32 copies and rounds
them back. The same copies serve an optimizer in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from umbra.services.config import TrainerConfig
from umbra.services.modeling.sharded import local


def make_optimizer(parameters: list[nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    rate, betas, decay = config.learning_rate, config.betas, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=betas[0], weight_decay=decay)
    return torch.optim.AdamW(parameters, rate, betas, weight_decay=decay, fused=True)


class MasterWeights:
    """A float32 copy of each of the trained `parameters`, sharded like it.

    Without a `device` there are none, and the optimizer updates the parameters.
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
        return [self.of(parameter) for parameter in self._trained]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the copy of `parameter`, or itself if there is none."""
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameters' gradients to the copies' gradients, in float32."""
        for parameter, copy in self._copies.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(local(copy).device, torch.float32)
            copy.grad = gradient if copy.grad is None else copy.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def push(self) -> None:
        for parameter, copy in self._copies.items():
            local(parameter).copy_(local(copy))
