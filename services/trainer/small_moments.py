"""AdamW whose moments are in bfloat16 or in 8 bits; sharded parameters, and checkpoints by rows.

The 8 bits are those of Dettmers et al. (arXiv 2110.02861, also in bitsandbytes and torchao): a
block of 256 numbers is divided by its largest, and each is rounded to the nearest of 256 values
that lie denser near zero. Blocks never cross a row, so any number of ranks can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from umbra.services.trainer.masters import local, rows_like

BLOCK = 256  # numbers that share a scale, or a row if it has less
NARROW = 32  # a row of less stays in float32: scales would be as large as what they save
PIECE = 1 << 24  # numbers that are there in float32 at a time, unless a row has more


class SmallMomentsAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) on float32 parameters.

    Moments are computed in float32 and rounded when they are kept, to nearest. In 8 bits are those
    of matrices whose rows have at least 32 numbers; all others are small and stay in float32.

    Args:
        parameters: sharded by rows or not.
        lr: learning rate.
        betas: of the first and the second moment.
        weight_decay: times the learning rate, what each step takes off.
        moments: "bf16" or "8bit".
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        moments: Literal["bf16", "8bit"],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
        super().__init__(parameters, defaults)
        self.kind = f"AdamW, {moments} moments"  # for a checkpoint
        self._moments = moments

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(self._fresh(parameter))
        state["step"] += 1
        count, (beta1, beta2), rate = float(state["step"]), group["betas"], group["lr"]
        assert parameter.grad is not None
        weights, gradients = local(parameter), local(parameter.grad)
        held = {name: local(value) for name, value in state.items() if name != "step"}
        for some in _pieces(weights):
            gradient, weight = gradients[some].float(), weights[some]
            piece = {name: value[some] for name, value in held.items()}
            first = _read(piece, "exp_avg", signed=True).lerp_(gradient, 1 - beta1)
            second = _read(piece, "exp_avg_sq", signed=False).mul_(beta2)
            second.addcmul_(gradient, gradient, value=1 - beta2)
            weight.mul_(1 - rate * group["weight_decay"])
            spread = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
            weight.addcdiv_(first, spread, value=-rate / (1 - beta1**count))
            _keep(piece, "exp_avg", first, signed=True)
            _keep(piece, "exp_avg_sq", second, signed=False)

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        shape = parameter.shape
        state = {"step": torch.zeros(())}
        width = shape[1:].numel() if len(shape) > 1 else 0
        for name in ("exp_avg", "exp_avg_sq"):
            if self._moments == "bf16":
                state[name] = rows_like(parameter, shape, torch.bfloat16)
            elif width < NARROW:
                state[name] = rows_like(parameter, shape, torch.float32)
            else:
                # The code of zero; its scale is zero too.
                state[name] = rows_like(parameter, shape, torch.uint8)
                blocks = [shape[0], -(-width // BLOCK)]
                state[f"{name}_scale"] = rows_like(parameter, blocks, torch.float32)
        return state


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """Rows of `tensor` to work on at a time; a number by itself has none."""
    rows = len(tensor)
    step = max(1, PIECE * rows // max(1, tensor.numel()))
    return (slice(start, start + step) for start in range(0, rows, step))


def _read(state: dict[str, Tensor], name: str, *, signed: bool) -> Tensor:
    """A moment in float32; new memory."""
    kept = state[name]
    if kept.dtype != torch.uint8:
        return kept.float() if kept.dtype != torch.float32 else kept.clone()
    return dequantized(kept, state[f"{name}_scale"], signed=signed)


def _keep(state: dict[str, Tensor], name: str, moment: Tensor, *, signed: bool) -> None:
    kept = state[name]
    if kept.dtype != torch.uint8:
        kept.copy_(moment)
        return
    codes, scale = quantized(moment, signed=signed)
    kept.copy_(codes)
    state[f"{name}_scale"].copy_(scale)


def quantized(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shape of `values` [R, ...]) and scales [R, blocks of a row] of float32."""
    rows = values.reshape(len(values), -1)
    width = rows.shape[1]
    blocks = functional.pad(rows, (0, -width % BLOCK)).view(len(rows), -1, BLOCK)
    scale = blocks.abs().amax(-1)
    relative = blocks / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    table = _table(signed).to(values.device)
    codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(len(rows), -1)[:, :width]
    return codes.reshape(values.shape), scale


def dequantized(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """What `quantized` made of its values, float32."""
    rows = codes.reshape(len(codes), -1)
    width = rows.shape[1]
    relative = _table(signed).to(codes.device)[rows.int()]
    blocks = functional.pad(relative, (0, -width % BLOCK)).view(len(rows), -1, BLOCK)
    values = (blocks * scale.unsqueeze(-1)).view(len(rows), -1)[:, :width]
    return values.reshape(codes.shape)


def _table(signed: bool) -> Tensor:
    """The 256 values of the dynamic map, ascending, between -1 and 1 or 0 and 1; float32 [256].

    Each of seven decades has a number of equal steps, twice as many as the one below it.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += means
        if signed:
            values += [-mean for mean in means]
    return torch.tensor(sorted(values), dtype=torch.float32)
