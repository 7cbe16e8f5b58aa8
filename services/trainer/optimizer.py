"""The optimizer, and the float32 master weights that it updates.

Updates underflow in bfloat16, so the optimizer of bf16 weights updates float32 copies and rounds
them back. The same copies serve an optimizer in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.sharded import local


def make_optimizer(parameters: list[nn.Parameter], config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer; UsageError if it needs torchao, which is missing."""
    rate, decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case "sgd":
            momentum = config.betas[0]
            return torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=decay)
        case "adamw8bit":
            try:
                from umbra.services.trainer.adamw8bit import AdamW8bit  # an extra
            except ImportError as error:
                raise UsageError(
                    "trainer.optimizer = adamw8bit needs torchao: pip install torchao"
                ) from error
            return AdamW8bit(parameters, rate, config.betas, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(parameters, rate, config.betas, weight_decay=decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameters; torchao's optimizers keep it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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
            if copy.grad is None:
                copy.grad = gradient
            else:
                copy.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def push(self) -> None:
        for parameter, copy in self._copies.items():
            local(parameter).copy_(local(copy))
