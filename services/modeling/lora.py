"""LoRA by `peft`: small factors are trained instead of the weights.

They go out merged, or by themselves to engines that have the base and the same adapter. A layer's
weight W [out, in] becomes W + alpha / rank * B A with B [out, rank], A [rank, in] (arXiv
2106.09685). B starts at zero, so the policy starts as the base model. Experts, whose weights are
one parameter [experts, out, in], have an A and a B each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts
from umbra.services.config import TrainerConfig
from umbra.services.modeling.sharded import held_rows, sharded_like, whole

BASE = ".base_layer"
_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The weight that a layer with an adapter, or all experts of one, stand for."""

    base: Tensor  # [out, in] or [experts, out, in], frozen
    a: Tensor  # [rank, in] or [experts * rank, in], rank by rank of each expert
    b: Tensor  # [out, rank] or [out, rank * experts], expert by expert of each rank
    scale: float  # of their product
    transposed: bool = False  # experts are [experts, in, out]

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight, sharded by its first dimension as the base is.

        Only the small factors are gathered: a collective if the ranks hold shards.
        """
        a, b = whole(self.a), whole(self.b)
        rows_held, first = held_rows("base", self.base)
        rows = slice(first, first + len(rows_held))
        if rows_held.dim() == 2:
            product = b[rows] @ a
        else:
            experts = self.base.shape[0]
            of_b = b.view(b.shape[0], -1, experts).permute(2, 0, 1)[rows]
            product = of_b @ a.view(experts, -1, a.shape[-1])[rows]
            product = product.mT if self.transposed else product
        return sharded_like(self.base, rows_held + self.scale * product, self.base.shape)


def add_adapter(
    model: PreTrainedModel, config: TrainerConfig, seed: int, *, merged: bool = True
) -> None:
    """Put an adapter into the layers that `trainer.lora_targets` names; all else is frozen.

    `seed` fixes A, so that all ranks begin alike. One that is never `merged` may be on an output
    layer that shares its weight with the embedding. Raises UsageError if peft is missing, no layer
    has such a name, or one cannot be merged.
    """
    try:
        from peft import LoraConfig, LoraModel
    except ImportError:
        raise UsageError("trainer.lora_rank needs peft: pip install 'umbra-rl[lora]'") from None
    modules, parameters = adapter_targets(model, config.lora_targets)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  # any number works
        target_modules=modules,
        target_parameters=parameters,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # Else peft takes names of dense layers for names of experts in checkpoints, and leaves shared
    # experts out.
    lora.peft_type = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        LoraModel(model, lora, _ADAPTER)
    except ValueError as error:
        raise UsageError(f"trainer.lora_targets: {error}") from error
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    strange = not all(map(is_adapter, trained))
    head: Any = model.get_output_embeddings()
    if strange or (merged and hasattr(head, "lora_A") and model.config.tie_word_embeddings):
        raise UsageError(
            "trainer.lora_targets: only linear layers that share their weight with no other layer, "
            "and experts, can have an adapter"
        )
    # Peft's own values are lost if the base is on meta.
    for name, values in first_factors(model, seed).items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(values))


@torch.no_grad()
def first_factors(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return A, drawn as peft does, and B, zeros, by the names of their parameters."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    first = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in adapter.items()}
    for name, values in first.items():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return first


def adapter_targets(model: PreTrainedModel, targets: list[str]) -> tuple[list[str], list[str]]:
    """Return the full names of modules, and of experts' parameters, that get an adapter.

    `targets` are names or their ends, as in peft; empty = all linear layers but the output, and the
    experts. Routers are neither.
    """
    head = model.get_output_embeddings()
    # Mamba multiplies by the weight of this one itself, whatever is around the layer.
    named = {n: m for n, m in model.named_modules() if not n.endswith(".dt_proj")}
    linear = [n for n, m in named.items() if isinstance(m, nn.Linear) and m is not head]
    experts = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and not isinstance(named[name.rpartition(".")[0]], _ConvNd)
    ]
    if not targets:
        return linear, experts
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in (*named, *experts)):
            names = sorted({name.rpartition(".")[2] for name in (*linear, *experts)})
            raise UsageError(
                f"trainer.lora_targets: {type(model).__name__} has no layer {target}; it has "
                + ", ".join(names)
            )
    ends = tuple(f".{target}" for target in targets)
    modules, parameters = ([n for n in of if f".{n}".endswith(ends)] for of in (named, experts))
    return modules, parameters


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def factors(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of every layer with an adapter: `<layer>[.<parameter>].lora_A.weight`."""
    stems = {name.removesuffix(".weight"): layer for name, layer in low_rank(model).items()}
    return {
        f"{stem}.lora_{kind}.weight": factor
        for stem, layer in stems.items()
        for kind, factor in (("A", layer.a), ("B", layer.b))
    }


def adapter_facts(config: TrainerConfig, base: str) -> AdapterFacts | None:
    """Return the facts of a published adapter for weights with checksum `base`; None if merged."""
    if config.lora_publish == "merged":
        return None
    return AdapterFacts(base=base, rank=config.lora_rank, alpha=config.lora_alpha)


def low_rank(
    model: nn.Module,
    of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
) -> dict[str, LowRank]:
    """Return each layer with an adapter by its weight's name; `of` is applied to parameters."""
    layers: dict[str, LowRank] = {}
    for name, module in model.named_modules():
        layer: Any = module
        if not (hasattr(layer, "lora_A") and hasattr(layer, "base_layer")):
            continue
        # Experts have several parameters, so the adapters of one may be around another's.
        weight = getattr(layer, "parameter_name", "weight")
        base = layer.get_base_layer()
        layers[f"{name.replace(BASE, '')}.{weight}"] = LowRank(
            of(getattr(base, weight)),
            of(layer.lora_A[_ADAPTER].weight),
            of(layer.lora_B[_ADAPTER].weight),
            layer.scaling[_ADAPTER],
            getattr(base, "is_transposed", False),
        )
    return layers
