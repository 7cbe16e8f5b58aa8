"""Runs inside of vLLM's workers: loads a version from memory of the generator.

Every worker of a tensor-parallel engine maps the version once and gives views of it to the model's
own loader, which copies the worker's part, and fuses and packs it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.generator.vllm import private
from umbra.services.modeling.gpu_copies import page_lock
from umbra.services.modeling.weights import first_names, tensors_in
from umbra.services.weights.gpu.cuda import Device, DeviceMemory
from umbra.services.weights.manifest import checksum
from umbra.services.weights.memory import MappedBlocks
from umbra.services.weights.verify import ChangedError

_OUTPUT = "lm_head.weight"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The place of versions on the GPU: memory of the generator. At the start none."""

    handle: bytes = b""
    size: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The place of a version's verified tensors: a block of the generator's shared memory.

    Or on the GPU, if it names none. They lie there until the update is finished. Where there are
    buckets, the load counts only if they have these checksums still.
    """

    path: str
    manifest: str  # JSON of a `Manifest`, of these tensors alone
    buckets: list[list[int]] = field(default_factory=list)  # start, end and checksum of each


class UmbraWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of a commit: `start_weight_update`, `update_weights`, `finish_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Prepare for updates, or map memory of the GPU for them; StartupError if that fails."""
        self._on_gpu: DeviceMemory | None = None  # before another is mapped
        if init_info.handle:
            device = Device(self.device.index or 0)
            self._on_gpu = DeviceMemory(device, init_info.size, init_info.handle)
            return
        self._blocks = MappedBlocks()  # each is mapped once
        self._updates: list[UpdateInfo] = []
        self._loaded: set[str] | None = set()  # parameters; None if the model does not tell
        self._tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        private.pack_experts_again(self.model)

    def start_weight_update(self) -> None:
        private.forget_broken_off(self.model)
        initialize_layerwise_reload(self.model)
        self._loaded, self._updates = set(), []

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load these tensors; raise StartupError if they are not where they should be."""
        manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
        memory = self._blocks.view(update_info.path) if update_info.path else self._on_gpu
        assert memory is not None
        if self.device.type == "cuda":
            page_lock(memory)
        self._load(tensors_in(manifest, memory))
        self._updates.append(update_info)

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
        """Pack parameters that were not packed when their layer was complete.

        Raises:
            UsageError: the version lacks a parameter of the model.
            ChangedError: the bytes that were loaded are not those that were verified.
        """
        missing = private.not_reached(self.model, self._tied and self.device.type != "cpu")
        if not missing and self._loaded is not None:
            quantized = self.model_config.quantization is not None
            missing = private.not_loaded(self.model, self._loaded, quantized)
        if missing:
            raise UsageError(
                f"vLLM found no weights for {first_names(missing)}: it names the tensors of this "
                "architecture differently from the trainer, or can't load them again"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        for update in self._updates:
            for start, end, expected in update.buckets:
                if checksum(self._blocks.view(update.path)[start:end]) != expected:
                    raise ChangedError(f"bytes {start} to {end} changed while they were loaded")

    def shutdown(self) -> None:
        """Do nothing: the end of the process frees all that is held."""


_PREFIX = "base_model.model."  # of names in peft's files


@dataclass
class AdapterInit(InitInfo):
    """The layout of versions: msgpack of `AdapterFacts`, and the names of their tensors."""

    facts: bytes = b""
    names: list[str] = field(default_factory=list)


class AdapterTransferEngine(UmbraWeightTransferEngine):
    """vLLM's side of a commit that loads an adapter."""

    init_info_cls = AdapterInit

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do as above; raise UsageError if vLLM would leave factors out."""
        super().init_transfer_engine(init_info)
        assert isinstance(init_info, AdapterInit)
        if init_info.handle:
            return
        self._facts = msgspec.msgpack.decode(init_info.facts, type=AdapterFacts)
        self._names = frozenset(_PREFIX + name for name in init_info.names)
        layers = {name.partition(".lora_")[0] for name in init_info.names}
        if strange := sorted(layers - private.adapter_places(self.model)):
            raise UsageError(
                f"trainer.lora_targets: vLLM has no adapters for {first_names(strange)}: leave "
                "such layers out, or set trainer.lora_publish = merged"
            )

    def start_weight_update(self) -> None:
        """Do nothing: there are no packed weights to take apart."""

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put these factors in the place of those before; raise UsageError if some are missing."""
        # Copies: the memory is used again, and vLLM multiplies B by the scale where it lies.
        came = {_PREFIX + name: tensor.clone() for name, tensor in tensors}
        if missing := sorted(self._names - came.keys()):
            raise UsageError(f"the version lacks {len(missing)} tensors, such as {missing[0]}")
        private.load_adapter(self.model, came, self._facts.rank, self._facts.alpha)
