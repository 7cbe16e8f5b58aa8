"""A synthetic model for the benchmarks of weight pushes: 300 tensors, and steps that change it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from umbra.proto.records import Manifest
from umbra.services.runtime.manifest import build_manifest

TENSORS = 300
NOISE = 1 << 22
STEP = 0.35  # |step| / lr of Adam with noisy gradients: half-normal, mean 0.28


class Model:
    """`TENSORS` bf16 tensors of about `total_bytes` in all, with fp32 masters if they are to learn.

    Sizes differ as those of a transformer do: a few large matrices, many middle ones, small norms.
    """

    def __init__(self, total_bytes: int, *, learns: bool = False, seed: int = 0) -> None:
        self.size = total_bytes
        torch.manual_seed(seed)
        weights = [24.0 if i == 0 else (0.002 if i % 3 == 0 else 1.0) for i in range(TENSORS)]
        unit = total_bytes / 2 / sum(weights) / 256
        shapes = [(max(1, round(unit * weight)), 256) for weight in weights]
        self.tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        self._twins: list[torch.Tensor] = []
        self.names = [f"layer.{i}" for i in range(TENSORS)]
        self._masters = [torch.randn(shape) * 0.02 for shape in shapes] if learns else []
        self._noise = torch.randn(2 * NOISE) * STEP if learns else torch.empty(0)
        if learns:
            self._cast()
        else:
            for tensor in self.tensors:
                tensor.zero_()  # faults the pages in

    def manifest(self, bucket_bytes: int) -> Manifest:
        """The layout of its versions."""
        given = [(name, "BF16", t.shape) for name, t in zip(self.names, self.tensors, strict=True)]
        return build_manifest(given, bucket_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def learn(self, lr: float) -> float:
        """One optimizer step; the share of bf16 values that it changed."""
        changed = 0
        for master, tensor in zip(self._masters, self.tensors, strict=True):
            flat, held = master.view(-1), tensor.view(-1)
            for start in range(0, flat.numel(), NOISE):
                part = flat[start : start + NOISE]
                shift = int(torch.randint(NOISE, ()))
                part.sub_(self._noise[shift : shift + part.numel()], alpha=lr)
                new = part.to(torch.bfloat16)
                old = held[start : start + NOISE]
                changed += int((new.view(torch.int16) != old.view(torch.int16)).sum())
                old.copy_(new)
        return changed / sum(tensor.numel() for tensor in self.tensors)

    def write(self, manifest: Manifest, slot: memoryview, wrote: Callable[[int], None]) -> None:
        """Copy all tensors to their places; `wrote` is told how far it is."""
        for entry, tensor in zip(manifest.tensors, self.tensors, strict=True):
            area = slot[entry.offset : entry.offset + entry.nbytes]
            torch.frombuffer(area, dtype=torch.bfloat16).copy_(tensor.view(-1))
            wrote(entry.offset + entry.nbytes)

    def load(self, manifest: Manifest, data: memoryview) -> None:
        """Copy all tensors from their places."""
        for entry, tensor in zip(manifest.tensors, self.tensors, strict=True):
            area = data[entry.offset : entry.offset + entry.nbytes]
            tensor.view(-1).copy_(torch.frombuffer(area, dtype=torch.bfloat16))

    def equals(self, manifest: Manifest, data: memoryview) -> bool:
        """Whether `data` holds the same bits."""
        return all(
            torch.equal(
                torch.frombuffer(data[e.offset : e.offset + e.nbytes], dtype=torch.int16),
                tensor.view(-1).view(torch.int16),
            )
            for e, tensor in zip(manifest.tensors, self.tensors, strict=True)
        )

    def copy_seconds(self) -> float:
        """Seconds of copying all tensors, one thread, into memory that is in use.

        The floor of a snapshot and of a commit; measured beside each of them, because a shared
        machine is slower at one moment than at another.
        """
        if not self._twins:
            self._twins = [torch.zeros_like(tensor) for tensor in self.tensors]
        began = time.perf_counter()
        for target, tensor in zip(self._twins, self.tensors, strict=True):
            target.copy_(tensor)
        return time.perf_counter() - began

    def _cast(self) -> None:
        for master, tensor in zip(self._masters, self.tensors, strict=True):
            tensor.copy_(master)
