"""Muon: momentum whose matrices are made orthogonal before they are applied.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the matrices of the layers, AdamW for all
else: embeddings, output layer, norms and biases. The rate is adjusted as in Moonlight (Liu et al.
2025, arXiv 2502.16982): an orthogonal update of an A x B matrix is scaled by 0.2 * sqrt(max(A, B)),
so that its root mean square is that of AdamW's updates, and learning rate and weight decay can be
those of AdamW. For whole matrices this is `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which
takes neither experts nor, without a collective in each of its steps, rows of a sharded matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.feasibility import muon_faults
from umbra.services.trainer.sharding import decoder_layers

MOMENTUM = 0.95  # of both papers
MATCH_RMS = 0.2  # Moonlight's
ROUNDS = 5  # of Newton and Schulz
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: a x + b x^3 + c x^5
LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon over `matrices`, and AdamW over `others`.

    Sharded matrices are gathered in bfloat16 one after the other, and every rank makes the whole of
    each orthogonal, so that it does not matter how many ranks there are. Experts are divided over
    ranks as whole matrices and need no gathering.

    Args:
        matrices: [A, B], or experts [E, A, B].
        others: all else.
        config: learning rate, weight decay, and the betas of AdamW.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: TrainerConfig
    ) -> None:
        self._adamw = torch.optim.AdamW(
            others,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        super().__init__([{"params": matrices, **rates}, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update with the gradients that are there."""
        assert closure is None
        group, *rest = self.param_groups
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._descend(parameter, parameter.grad, group["lr"], group["weight_decay"])
        # Whoever loads a state puts new groups and a new state into this object alone.
        self._adamw.param_groups, self._adamw.state = rest, self.state
        self._adamw.step()

    def _descend(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
        parameter.mul_(1 - rate * decay)
        scale = MATCH_RMS * math.sqrt(max(parameter.shape[-2:]))
        parameter.add_(_orthogonal_rows(update.bfloat16()), alpha=-rate * scale)


def _orthogonal_rows(update: Tensor) -> Tensor:
    """`orthogonal` of a matrix that may be sharded, sharded alike."""
    if not isinstance(update, DTensor):
        return orthogonal(update)
    if update.dim() > 2 and not any(p.is_shard() and not p.is_shard(0) for p in update.placements):
        # What this rank holds are whole matrices of experts.
        own = update.to_local()
        found = orthogonal(own) if len(own) else own
        return DTensor.from_local(
            found,
            update.device_mesh,
            update.placements,
            shape=update.shape,
            stride=update.stride(),
        )
    whole = orthogonal(update.full_tensor())
    # All ranks have computed the same, so nothing is sent.
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, by Newton and Schulz's iteration; bfloat16 [..., A, B].

    Singular values become about 1 (0.7 to 1.2), which is as good as 1 here (Jordan et al. 2024).
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    product = torch.addmm if x.dim() == 2 else torch.baddbmm
    first, second, third = QUINTIC
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return x.mT.contiguous() if tall else x


def muon(model: PreTrainedModel, config: TrainerConfig) -> Muon:
    """Muon over the weights of `model` that are trained.

    Raises:
        UsageError: an adapter is trained, whose factors are no weights of a layer, or the
            optimizer is to update copies.
    """
    if config.lora_rank:
        raise UsageError(
            "trainer.optimizer = muon does not train an adapter: set trainer.lora_rank = 0, or "
            "trainer.optimizer = adamw"
        )
    if fault := next(muon_faults(config), ""):
        raise UsageError(fault)
    matrices = dict.fromkeys(_matrices(model))
    others = [p for p in model.parameters() if p.requires_grad and p not in matrices]
    return Muon([*matrices], others, config)


def _matrices(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Weights of layers, those of experts included, which are [E, A, B]."""
    for layer in decoder_layers(model):
        for name, parameter in layer.named_parameters():
            experts = "experts." in name and parameter.dim() == 3
            if (parameter.dim() == 2 or experts) and not name.endswith("bias"):
                yield parameter
