"""Runs inside of vLLM's workers: loads a version from memory of the generator.

Every worker of a tensor-parallel engine maps the version once and gives views of it to the model's
own loader, which copies the worker's part, and fuses and packs it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.generator.vllm.plugin import ADAPTER
from umbra.services.modeling.gpu_copies import page_lock
from umbra.services.modeling.weights import tensors_in
from umbra.services.weights.memory import MappedBlocks

_NAMES_SHOWN = 3
_OUTPUT = "lm_head.weight"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: each update says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where tensors of a version lie, verified: in a block of the generator's shared memory.

    They lie there until the update is finished.
    """

    path: str
    manifest: bytes  # msgpack of a `Manifest`, of these tensors alone


class UmbraWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of a commit: `start_weight_update`, `update_weights`, `finish_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Called once, before the first update."""
        self._blocks = MappedBlocks()  # each is mapped once
        self._loaded: set[str] | None = set()  # parameters; None if the model does not tell
        self._tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        pack_experts_again(self.model)

    def start_weight_update(self) -> None:
        """Bring the model back to how it was before its weights were packed for the kernels."""
        initialize_layerwise_reload(self.model)
        self._loaded = set()

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load these tensors.

        Raises:
            StartupError: they are not where they should be.
        """
        manifest = msgspec.msgpack.decode(update_info.manifest, type=Manifest)
        memory = self._blocks.view(update_info.path)
        if self.device.type == "cuda":
            page_lock(memory)
        self._load(tensors_in(manifest, memory))

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Some models have no output layer besides a tied embedding, and refuse one by its name.
        loaded = self.model.load_weights(
            (name, tensor)
            for name, tensor in tensors
            if name != _OUTPUT or hasattr(self.model, "lm_head") or not self._tied
        )
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= loaded

    def finish_weight_update(self) -> None:
        """Pack what was not packed when its layer was complete.

        Raises:
            UsageError: the version lacks a parameter of the model.
        """
        quantized = self.model_config.quantization is not None
        missing = not_reached(self.model, self._tied and self.device.type != "cpu")
        if not missing and self._loaded is not None:
            missing = not_loaded(self.model, self._loaded, quantized)
        if missing:
            raise UsageError(
                f"vLLM found no weights for {', '.join(missing[:_NAMES_SHOWN])}"
                + (f" and {len(missing) - _NAMES_SHOWN} more" * (len(missing) > _NAMES_SHOWN))
                + ": it names the tensors of this architecture differently from the trainer, or "
                "can't load them again"
            )
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held that the end of the process does not free."""


def not_reached(model: torch.nn.Module, tied: bool) -> list[str]:
    """Parameters of layers that are not complete, of which nothing has come.

    vLLM would put their old weights back. So it is where a model's loader copies weights itself,
    past what takes note of them for a later load, and yet says that they were loaded.

    Args:
        tied: the output layer reads the embedding's weights where they lie.
    """
    found: list[str] = []
    for prefix, layer in model.named_modules():
        info: Any = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        if tied and isinstance(layer, ParallelLMHead):
            continue
        came = {name for name, _ in info.loaded_weights} | SKIP_TENSORS
        own = (name for name, _ in layer.named_parameters(recurse=False) if name not in came)
        found += [f"{prefix}.{name}" for name in own]
    return found


def not_loaded(model: torch.nn.Module, loaded: set[str], quantized: bool) -> list[str]:
    """Parameters of `model` that its loader should have filled but did not, by name.

    vLLM asks for all of them where nothing is quantized, and else for none. Quantization adds
    scales, which it computes from the weights of the same layer: so we ask for one of each layer
    then. Scales of the KV cache are the attention's own and come from no trainer.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    # A router's correction belongs to its experts as well, and came under one of its names.
    there = {id(parameter) for name, parameter in named if name in loaded}
    if quantized:
        for layer in model.modules():
            own = {id(parameter) for parameter in layer.parameters(recurse=False)}
            if is_deferred_attention_layer(layer) or own & there:
                there |= own
    return sorted({name for name, parameter in named if id(parameter) not in there})


def pack_experts_again(model: torch.nn.Module) -> None:
    """Have experts packed for the kernel at every load, before they are copied to their places.

    vLLM 0.32 packs those of CPUs at the first load only
    (`UnquantizedFusedMoEMethod._setup_kernel`); later ones would be copied unpacked into what the
    kernel reads as packed. To be called after the first load.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            isinstance(method, UnquantizedFusedMoEMethod)
            and method.unquantized_backend is UnquantizedMoeBackend.CPU
            and method.moe_kernel is not None
        ):
            # In place of vLLM's whole step, so that a version that packs does not do it twice.
            experts = method.moe_kernel.fused_experts
            method.process_weights_after_loading = experts.process_weights_after_loading


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

    def finish_weight_update(self) -> None:
        """Never called."""
        raise NotImplementedError

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put these factors in the place of those before.

        Raises:
            UsageError: some are missing.
        """
        # Copies: the memory is used again, and vLLM multiplies B by the scale where it lies.
        came = {_PREFIX + name: tensor.clone() for name, tensor in tensors}
        if missing := sorted(self._names - came.keys()):
            raise UsageError(f"the version lacks {missing[0]} (of {len(missing)} such tensors)")
        # peft's config of it. Scales are any number, whatever the annotation says.
        config = PEFTHelper(
            r=self._facts.rank,
            lora_alpha=self._facts.alpha,  # pyright: ignore[reportArgumentType]
            target_modules=[],
        )
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER, came, config, device="cpu", dtype=self._manager.lora_config.lora_dtype
        )
        self._manager.remove_adapter(ADAPTER)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER)

    def _places(self) -> set[str]:
        """Return the names in checkpoints of the layers that have an adapter in vLLM."""
        packed: dict[str, list[str]] = self._manager.packed_modules
        return {name for layer in self._manager.modules for name in packed.get(layer, [layer])}
