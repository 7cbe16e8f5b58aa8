"""From a version in this process's memory to the update by which vLLM's workers load it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.generator.vllm.names import CheckpointNames
from umbra.services.modeling.weights import WeightTable
from umbra.services.weights.manifest import Part
from umbra.services.weights.memory import copy, locate, shared_memory


@dataclass(frozen=True, slots=True)
class Update:
    """The place of a version: byte `start` of the file `path`, which a process of this user maps.

    The path is empty for memory of the GPU. `memory` are its bytes; `is_copy`: nobody else keeps
    them.
    """

    path: str
    start: int
    memory: Part
    is_copy: bool
    layout: Manifest  # in vLLM's names, offsets within the file

    def info(self, buckets: list[list[int]] | None = None) -> dict[str, Any]:
        """Return the fields of `UpdateInfo`."""
        manifest = msgspec.json.encode(self.layout).decode()
        return {"path": self.path, "manifest": manifest, "buckets": buckets or []}


class Updates:
    """A maker of updates for versions of `outline`, a model without weights, or its adapter."""

    def __init__(self, outline: Any, adapter: AdapterFacts | None = None) -> None:
        self._fit = WeightTable(outline, adapter)
        self._checkpoint = CheckpointNames(outline) if adapter is None else None

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError unless versions of this layout fit the model."""
        self._fit.check(manifest)

    def of(self, manifest: Manifest, data: Part, *, is_mapped: bool = False) -> Update:
        """Return the update that loads `data`, from the GPU where workers have mapped it.

        Data that is neither there nor in shared memory is copied to shared memory.
        """
        place = ("", 0) if is_mapped else locate(data) if isinstance(data, memoryview) else None
        is_copy = place is None
        if place is None:
            whole = shared_memory(len(data))
            copy(data if isinstance(data, memoryview) else bytes(data), whole)
            data, place = whole, locate(whole)
            assert place is not None
        path, start = place
        return Update(path, start, data, is_copy, self._layout(manifest, start))

    def _layout(self, manifest: Manifest, start: int) -> Manifest:
        """Return the layout of a version from byte `start` on, in the names of checkpoints."""
        if self._checkpoint is None:  # factors have one name
            moved = [replace(entry, offset=entry.offset + start) for entry in manifest.tensors]
            return replace(manifest, tensors=moved)
        # A version has tied tensors once, but vLLM packs them for each layer.
        tied = self._fit.left_out({entry.name for entry in manifest.tensors})
        tensors = [
            part
            for entry in manifest.tensors
            for name in (entry.name, *tied.get(entry.name, ()))
            for part in self._checkpoint.of(replace(entry, name=name, offset=entry.offset + start))
        ]
        return replace(manifest, tensors=tensors)
