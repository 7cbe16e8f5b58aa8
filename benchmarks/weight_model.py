"""A synthetic model for the benchmarks of weight pushes: 300 tensors, and steps that change it.

At the trainer's end it has float32 parameters, which `write_shards` casts into the slot as it does
for a real policy; at the engine's end bf16 parameters, which a `WeightTable` fills as the torch
engine does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from umbra.proto.records import Manifest
from umbra.services.modeling.weights import WeightTable, tensors_in
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.receiver import StagedVersion
from umbra.services.weights.verify import THREADS, Checksums

TENSORS = 300
SERVED = "bfloat16"
NOISE = 1 << 22
TOUCHED = 1 << 15  # of so many values one changes where nothing is learned
STEP = 0.35  # |step| / lr of Adam with noisy gradients: half-normal, mean 0.28


class Model(nn.Module):
    """`TENSORS` parameters whose bf16 form has about `total_bytes` in all.

    Sizes differ as in a transformer: a few large matrices, many middle ones, small norms.

    Args:
        learns: float32 parameters that can learn; else bf16 ones that are filled.
    """

    def __init__(self, total_bytes: int, *, learns: bool = False) -> None:
        super().__init__()
        self.size = total_bytes
        torch.manual_seed(0)
        weights = [24.0 if i == 0 else (0.002 if i % 3 == 0 else 1.0) for i in range(TENSORS)]
        unit = total_bytes / 2 / sum(weights) / 256
        self._shapes = [(max(1, round(unit * weight)), 256) for weight in weights]
        tensors = self._allocate(torch.float32 if learns else torch.bfloat16)
        self._memory = [tensor.view(-1) for tensor in tensors]
        for index, tensor in enumerate(tensors):
            self.register_parameter(f"layer{index}", nn.Parameter(tensor, requires_grad=False))
        if learns:
            for memory in self._memory:
                memory.normal_().mul_(0.02)
        self._noise = torch.randn(2 * NOISE) * STEP if learns else torch.empty(0)
        self._table = WeightTable(self)
        self._served: Sequence[torch.Tensor] = ()

    def _allocate(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in self._shapes]

    def manifest(self, bucket_bytes: int) -> Manifest:
        """Return the layout of its versions."""
        return build_manifest(tensor_layout(self, SERVED), bucket_bytes)

    @property
    def nbytes(self) -> int:
        return 2 * sum(tensor.numel() for tensor in self.parameters())

    def learn(self, lr: float) -> float:
        """Make one optimizer step; return the share of bf16 values that it changed."""
        changed = 0
        for flat in self._memory:
            for start in range(0, flat.numel(), NOISE):
                part = flat[start : start + NOISE]
                old = part.to(torch.bfloat16)
                shift = int(torch.randint(NOISE, ()))
                part.sub_(self._noise[shift : shift + part.numel()], alpha=lr)
                new = part.to(torch.bfloat16)
                changed += int((new.view(torch.int16) != old.view(torch.int16)).sum())
        return changed / sum(len(flat) for flat in self._memory)

    def touch(self) -> None:
        """Change a value in every bucket: enough where all bytes are sent, and faster."""
        for flat in self._memory:
            flat[::TOUCHED].mul_(1.02)  # more than half a unit of bf16's last place

    def write(self, manifest: Manifest, slot: memoryview) -> list[int]:
        """Cast all tensors into `slot`, as the trainer does; return the buckets' checksums."""
        sums = Checksums(manifest, slot, THREADS)
        write_shards(self, manifest, slot, sums=sums)
        return sums.result()

    def load(self, manifest: Manifest, data: memoryview) -> None:
        """Copy all tensors from their places, as the torch engine does."""
        self._table.load(manifest, data)

    def load_staged(self, staged: StagedVersion) -> None:
        """Load a version as the torch engine does."""
        self._table.load(staged.manifest, staged.data)

    def equals(self, manifest: Manifest, data: memoryview) -> bool:
        """Return whether `data` holds the same bits."""
        held = dict(self.named_parameters())
        return all(
            torch.equal(tensor.view(torch.int16), held[name].view(torch.int16))
            for name, tensor in tensors_in(manifest, data)
        )

    def cast(self) -> dict[str, torch.Tensor]:
        """Return a version as tensors of its own, for those who send tensors."""
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.named_parameters()}

    def cast_seconds(self) -> float:
        """Measure a cast of all tensors into memory in use by one thread: a snapshot's floor."""
        self._served = self._served or self._allocate(torch.bfloat16)
        began = time.perf_counter()
        for target, source in zip(self._served, self.parameters(), strict=True):
            target.copy_(source)
        return time.perf_counter() - began
