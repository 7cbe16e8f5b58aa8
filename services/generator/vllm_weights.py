"""Runs inside of vLLM's workers: loads a version from memory of the generator or of the hub.

Every worker of a tensor-parallel engine reads the whole version and keeps its part; what is fused
or packed is left to the model's own loader, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from umbra.proto.errors import PeerLostError, UsageError
from umbra.proto.records import Manifest
from umbra.services.modeling.weights import tensors_in, whole_tensors
from umbra.services.runtime.arena import ArenaReader
from umbra.services.runtime.manifest import checksum
from umbra.services.runtime.mapped import MappedBlocks

_NAMES_SHOWN = 3


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: each update says where it lies."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where a version lies.

    With `slot` -1 it is verified already and lies in a block of the generator's shared memory;
    else in that slot of the hub's arena, to be verified against `checksums` while it is read.
    """

    path: str
    manifest: bytes  # msgpack of a `Manifest`
    slot: int = -1
    checksums: list[int] = field(default_factory=list)


class UmbraWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of a commit: `start_weight_update`, `update_weights`, `finish_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Called once, before the first update."""
        self._blocks = MappedBlocks()

    def start_weight_update(self) -> None:
        """Bring the model back to how it was before its weights were packed for the kernels."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As in the base class, which would also synchronise where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors; each stays alive until its layer is complete.

        Raises:
            UsageError: the version lacks a parameter of the model.
            UmbraError: it is not where it should be, or was damaged.
        """
        manifest = msgspec.msgpack.decode(update_info.manifest, type=Manifest)
        if update_info.slot < 0:
            tensors = tensors_in(manifest, self._blocks.view(update_info.path))
        else:
            tensors = whole_tensors(manifest, _verified(manifest, update_info))
        wanted = {name for name, _ in self.model.named_parameters()}
        loaded = self.model.load_weights(tensors)
        missing = sorted(wanted - loaded) if loaded is not None else []
        if missing:
            raise UsageError(
                f"vLLM found no weights for {', '.join(missing[:_NAMES_SHOWN])}"
                + (f" and {len(missing) - _NAMES_SHOWN} more" * (len(missing) > _NAMES_SHOWN))
                + ": it names the tensors of this architecture differently from the trainer"
            )

    def finish_weight_update(self) -> None:
        """Pack what was not packed when its layer was complete."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held that the end of the process does not free."""


def _verified(manifest: Manifest, info: UpdateInfo) -> Iterator[tuple[int, memoryview]]:
    """Start and bytes of every bucket, each in new memory."""
    reader = ArenaReader(info.path, slot_bytes=manifest.total_bytes)
    try:
        for index, (start, end) in enumerate(manifest.buckets):
            bucket = memoryview(bytearray(end - start))
            reader.read(info.slot, start, bucket)
            if checksum(bucket) != info.checksums[index]:
                raise PeerLostError(f"checksum of bucket {index} [{start}, {end}) is wrong")
            yield start, bucket
    finally:
        reader.close()
