"""LoRA by `peft`: small factors are trained instead of the weights, and merged where they go out.

A layer's weight W [out, in] becomes W + alpha / rank * B A with B [out, rank], A [rank, in]
(arXiv 2106.09685). B starts at zero, so the policy starts as the base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.runtime.config import Trainer

BASE = ".base_layer"
_ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The weight that a layer with an adapter stands for."""

    base: Tensor  # [out, in], frozen
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.base.shape

    @torch.no_grad()
    def merged(self) -> Tensor:
        """[out, in] in the base's dtype; sharded by rows as the base is.

        Only A, which is small, is gathered: a collective if the ranks hold shards.
        """
        if not isinstance(self.base, DTensor):
            return self.base + self.scale * (self.b @ self.a)
        assert isinstance(self.a, DTensor) and isinstance(self.b, DTensor)
        own = self.base.to_local() + self.scale * (self.b.to_local() @ self.a.full_tensor())
        return DTensor.from_local(
            own,
            self.base.device_mesh,
            self.base.placements,
            run_check=False,
            shape=self.base.shape,
            stride=self.base.stride(),
        )


def add_adapter(model: PreTrainedModel, config: Trainer, seed: int) -> None:
    """Put an adapter into the layers that `trainer.lora_targets` names; all else is frozen.

    `seed` fixes A, so that all ranks begin alike.

    Raises:
        UsageError: peft is missing, no layer has such a name, or one cannot be merged.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UsageError(
            "trainer.lora_rank needs peft: install it with pip install 'umbra-rl[lora]'"
        ) from None
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  # any number works
        target_modules=config.lora_targets or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UsageError(f"trainer.lora_targets: {error}") from error
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    strange = [name for name in trained if ".lora_A." not in name and ".lora_B." not in name]
    head: Any = model.get_output_embeddings()
    if strange or (hasattr(head, "lora_A") and model.config.tie_word_embeddings):
        raise UsageError(
            "trainer.lora_targets: only linear layers that share their weight with no other layer "
            "can have an adapter"
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def low_rank(model: nn.Module) -> dict[str, LowRank]:
    """What every layer with an adapter stands for, by its weight's name without the adapter."""
    found: dict[str, LowRank] = {}
    for name, module in model.named_modules():
        layer: Any = module
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            found[f"{name}.weight"] = LowRank(
                layer.base_layer.weight,
                layer.lora_A[_ADAPTER].weight,
                layer.lora_B[_ADAPTER].weight,
                layer.scaling[_ADAPTER],
            )
    return found
