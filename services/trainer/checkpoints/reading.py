"""Reading a checkpoint, on any number of ranks: each takes the rows that it holds itself."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from umbra.services.trainer.checkpoints.index import DamagedError, Index, file_name
from umbra.services.trainer.snapshot import chunk, own_rows

# Safetensors' names of what optimizers and models keep.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Saved:
    """An open checkpoint; a context manager.

    Raises:
        DamagedError: a file cannot be read.
    """

    def __init__(self, directory: Path, index: Index, rank: int = 0, world: int = 1) -> None:
        self.directory = directory
        self.index = index
        self.rank = rank
        self.world = world
        self._stack = ExitStack()
        self._files: list[Any] = []
        self._first: list[dict[str, int]] = []  # the first row of each tensor in each file
        try:
            for number in range(index.world):
                path = directory / file_name(number)
                file: Any = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.append(file)
                self._first.append(self._rows_of(file, number))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise DamagedError(f"{directory} cannot be read: {error}") from error

    def __enter__(self) -> Saved:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _rows_of(self, file: Any, number: int) -> dict[str, int]:
        """The first row of each tensor in the file of a rank."""
        if self.index.format > 1:
            return json.loads(file.metadata()["first"])
        layout, world = self.index.tensors, self.index.world
        return {
            name: chunk(layout[name].shape[0], number, world)[0] if layout[name].shape else 0
            for name in file.keys()
        }

    def part(self, name: str) -> SavedPart:
        """What is saved under the name of a part; nothing, if there was no such part."""
        return SavedPart(self, name)

    def facts(self, part: str) -> dict[str, Any]:
        """What this rank saved of `part` besides tensors; the last one's, if there were fewer."""
        metadata = self._files[min(self.rank, len(self._files) - 1)].metadata()
        return json.loads(metadata["facts"]).get(part, {})

    @torch.no_grad()
    def fill(self, full_name: str, place: Tensor) -> None:
        """Copy what `place` holds of the tensor: its own rows if it is sharded, else all."""
        shape = self.index.tensors[full_name].shape
        if isinstance(place, DTensor):
            local, first = own_rows(full_name, place, self.rank, self.world)
        else:
            local, first = place.detach(), 0
        held = local.shape[0] if shape else 1
        for file, starts in zip(self._files, self._first, strict=True):
            if full_name not in starts or local.numel() == 0:
                continue
            if not shape:
                local.copy_(file.get_tensor(full_name))
                continue
            source, start = file.get_slice(full_name), starts[full_name]
            begin, stop = max(start, first), min(start + source.get_shape()[0], first + held)
            if begin < stop:
                local[begin - first : stop - first].copy_(source[begin - start : stop - start])


class SavedPart:
    """One part of an open checkpoint."""

    def __init__(self, saved: Saved, name: str) -> None:
        self.source = f"checkpoint {saved.directory}"
        self.facts = saved.facts(name)
        self._saved = saved
        self._prefix = f"{name}/"
        self.names = {
            full.removeprefix(self._prefix)
            for full in saved.index.tensors
            if full.startswith(self._prefix)
        }

    def layout(self, name: str) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of a whole tensor."""
        info = self._saved.index.tensors[self._prefix + name]
        return info.shape, DTYPES[info.dtype]

    def fill(self, name: str, place: Tensor) -> None:
        """Copy what `place` holds of the tensor: its own rows if it is sharded, else all."""
        self._saved.fill(self._prefix + name, place)
