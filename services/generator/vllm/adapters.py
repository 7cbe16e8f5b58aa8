"""Runs inside of vLLM's workers: versions that are the factors of an adapter alone.

The factors fill vLLM's own adapter number `ADAPTER`, which every request names. The weights of the
base stay as vLLM loaded them; nothing is merged.

All versions are one update of vLLM's, which is never finished: when it ends one, it takes the base
for replaced and drops all adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts
from umbra.services.generator.vllm.plugin import ADAPTER
from umbra.services.generator.vllm.weights import (
    InitInfo,
    UmbraWeightTransferEngine,
    UpdateInfo,
)

_NAMES_SHOWN = 3
_PREFIX = "base_model.model."  # of names in peft's files


@dataclass
class AdapterInit(InitInfo):
    """What versions will be of: msgpack of `AdapterFacts`, and the names of their tensors."""

    facts: bytes = b""
    names: list[str] = field(default_factory=list)


class AdapterTransferEngine(UmbraWeightTransferEngine):
    """vLLM's side of a commit that loads an adapter."""

    init_info_cls = AdapterInit

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Called once, before the first update.

        Raises:
            UsageError: vLLM would leave factors out.
        """
        super().init_transfer_engine(init_info)
        assert isinstance(init_info, AdapterInit)
        self._facts = msgspec.msgpack.decode(init_info.facts, type=AdapterFacts)
        self._manager: Any = self.model.lora_manager
        self._names = frozenset(_PREFIX + name for name in init_info.names)
        self._came: dict[str, torch.Tensor] = {}
        layers = {name.partition(".lora_")[0] for name in init_info.names}
        if strange := sorted(layers - self._places()):
            more = len(strange) - _NAMES_SHOWN
            raise UsageError(
                "trainer.lora_targets: vLLM has no adapters for "
                + ", ".join(strange[:_NAMES_SHOWN])
                + f" and {more} more" * (more > 0)
                + ": leave such layers out, or set trainer.lora_publish = merged"
            )

    def start_weight_update(self) -> None:
        """Called once: nothing is taken apart."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Keep these factors aside; the old ones are served until a version is complete."""
        if update_info.complete:
            self._serve()
        else:
            super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """Never called."""
        raise NotImplementedError

    def _serve(self) -> None:
        """Put the factors that came in the place of those before.

        Raises:
            UsageError: some have not come.
        """
        if missing := sorted(self._names - self._came.keys()):
            raise UsageError(f"the version lacks {missing[0]} (of {len(missing)} such tensors)")
        # peft's config of it. Scales are any number, whatever the annotation says.
        config = PEFTHelper(
            r=self._facts.rank,
            lora_alpha=self._facts.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=[],
        )
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER, self._came, config, device="cpu", dtype=self._manager.lora_config.lora_dtype
        )
        self._came = {}
        self._manager.remove_adapter(ADAPTER)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Copies: the memory is used again, and vLLM multiplies B by the scale where it lies.
        self._came |= {_PREFIX + name: tensor.clone() for name, tensor in tensors}

    def _begin_anew(self) -> None:
        self._came = {}

    def _places(self) -> set[str]:
        """The layers that have an adapter in vLLM, by their names in checkpoints."""
        packed: dict[str, list[str]] = self._manager.packed_modules
        return {name for layer in self._manager.modules for name in packed.get(layer, [layer])}
