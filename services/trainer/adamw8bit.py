"""torchao's AdamW with moments in 8 bits, for sharded parameters and checkpoints by rows.

Imported where it is asked for, as torchao is an extra. The 8-bit format is by Dettmers et al.
(arXiv 2110.02861): a block of numbers is divided by its largest, and each is rounded to the nearest
of 256 values that lie denser near zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit as TorchAOAdamW8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed

from umbra.services.modeling.sharded import local, sharded_like

BLOCK = 128  # numbers that share a scale; it divides widths that 256 does not (896, Qwen2.5-0.5B)
MOMENTS = ("exp_avg", "exp_avg_sq")
_ZERO = get_qmap_signed().index(0.0)
_compiled: Callable[..., None] = torch.compile(single_param_adam, fullgraph=True, dynamic=False)


class AdamW8bit(TorchAOAdamW8bit):
    """AdamW8bit whose blocks never cross a row, and whose small second moments do no harm.

    Rows that blocks do not fill, and vectors, have float32 moments. So any number of ranks can
    hold the rows, and a checkpoint can be resumed by another number of them. Updates see local
    rows: compiled for a DTensor, torchao's fail where ranks have different numbers of rows.

    A second moment below 2e-7 of the largest in its block is rounded to 0 while the first moment is
    kept; where the next gradient is 0 (an embedding's row, an expert without tokens) the update is
    first / eps: 237 learning rates in one step of `tests/trainer/test_adamw8bit.py`. So the first
    moment is set to 0 together with the second.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, lr, betas, weight_decay=weight_decay, block_size=BLOCK)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = self._zeros(parameter, name)
        state["step"] += 1
        rows = local(parameter)
        first, second = (state[name] for name in MOMENTS)
        if not rows.numel():
            return
        with torch._dynamo.utils.disable_cache_limit():
            _compiled(
                rows, local(gradient), state["step"], first, second, None, group["lr"],
                *group["betas"], group["weight_decay"], group["eps"], True, False,
            )  # fmt: skip
        if isinstance(first, OptimState8bit):
            first.codes.masked_fill_(second.codes == 0, _ZERO)

    def _zeros(self, parameter: Tensor, name: str) -> Tensor:
        rows = local(parameter)
        if not in_8_bits(parameter.shape) or not rows.numel():
            return torch.zeros_like(rows)
        signed = name == MOMENTS[0]
        return OptimState8bit.zeros(rows.shape, signed, BLOCK, rows.device, dtype=rows.dtype)

    def unpack(self, parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of `parameter` as plain tensors, sharded like it, of the same memory.

        A moment in 8 bits becomes its codes (uint8, shape of the parameter) and `<name>_scale`
        (float32 [rows, blocks of a row]).
        """
        plain = dict(state)
        for name in MOMENTS if state else ():
            moment = state[name]
            if in_8_bits(parameter.shape):
                if isinstance(moment, OptimState8bit):
                    codes, scale = moment.codes, moment.scale
                else:  # this rank has no rows of it
                    codes, scale = moment.to(torch.uint8), moment.new_empty(0)
                blocks = parameter.shape[1:].numel() // BLOCK
                plain[f"{name}_scale"] = sharded_like(
                    parameter, scale.view(len(codes), blocks), (len(parameter), blocks)
                )
                moment = codes
            plain[name] = sharded_like(parameter, moment, parameter.shape)
        return plain

    def pack(self, parameter: Tensor, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the state that `unpack` made `plain` of."""
        state = {"step": plain["step"].cpu()}
        for name in MOMENTS:
            state[name] = moment = self._zeros(parameter, name)
            if isinstance(moment, OptimState8bit):
                moment.codes.copy_(local(plain[name]))
                moment.scale.copy_(local(plain[f"{name}_scale"]).flatten())
            else:
                moment.copy_(local(plain[name]))
        return state


def in_8_bits(shape: torch.Size) -> bool:
    """True if moments of this shape are in 8 bits: blocks fill its rows."""
    return len(shape) > 1 and shape[1:].numel() % BLOCK == 0
