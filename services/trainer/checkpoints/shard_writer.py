"""One rank's file of a checkpoint: copied between two updates, written while training goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from umbra.services.process.files import DISK, FILE_MODE, Disk
from umbra.services.trainer.checkpoints.index import FileInfo, TensorInfo, file_name
from umbra.services.trainer.checkpoints.parts import CheckpointPart
from umbra.services.trainer.checkpoints.reading import NAMES
from umbra.services.trainer.snapshot import own_rows
from umbra.services.weights.safetensors_file import Stored, Written, write_safetensors

T = TypeVar("T")


@dataclass(frozen=True)
class ShardCopy:
    """What a rank holds, in memory that nobody else writes to; and the layout of the whole."""

    rows: dict[str, Tensor]  # by "part/name", on the CPU; without those of which it has none
    first: dict[str, int]  # the number of the first of these rows
    facts: str  # JSON
    layout: dict[str, TensorInfo]

    def write(self, path: Path, disk: Disk = DISK) -> FileInfo:
        """Write it as a new file; return when the disk has it.

        Raises:
            OSError: it cannot be written.
        """
        stored = (
            Stored(name, NAMES[rows.dtype], rows.shape, _bytes(rows))
            for name, rows in self.rows.items()
        )
        facts = {"facts": self.facts, "first": json.dumps(self.first)}
        written: Written = write_safetensors(
            path, stored, facts, sync=True, mode=FILE_MODE, disk=disk
        )
        return FileInfo(written.size, written.checksum)


class ShardWriter:
    """Copies and writes the share of this rank, one at a time.

    The memory of the copy, as much as all parts need, is used again and again.

    Args:
        holders: the first so many ranks write all rows; see `Ranks`.
    """

    def __init__(self, parts: Mapping[str, CheckpointPart], rank: int, holders: int) -> None:
        self.copy_s = 0.0  # seconds that the last copy took: what training has waited
        self.copies = 0  # made so far
        self._parts = parts
        self._rank = rank
        self._holders = holders
        self._memory: dict[str, Tensor] = {}
        self._writing: Future[Any] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="umbra-checkpoint")

    @torch.no_grad()
    def copy(self) -> ShardCopy:
        """What this rank holds now; waits until the copy before has been written."""
        if self._writing is not None:
            wait([self._writing])
        begin = time.perf_counter()
        rows: dict[str, Tensor] = {}
        begins: dict[str, int] = {}
        layout: dict[str, TensorInfo] = {}
        for part_name, part in self._parts.items():
            for name, tensor in part.tensors().items():
                full = f"{part_name}/{name}"
                layout[full] = TensorInfo(list(tensor.shape), NAMES[tensor.dtype])
                own, first = own_rows(full, tensor, self._rank, self._holders)
                if own.numel():
                    begins[full] = first
                    rows[full] = self._room(full, own).copy_(own, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        facts = {name: dict(part.facts()) for name, part in self._parts.items()}
        self.copy_s = time.perf_counter() - begin
        self.copies += 1
        return ShardCopy(rows, begins, json.dumps(facts), layout)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` in the thread."""
        future = self._executor.submit(work)
        self._writing = future
        return future

    def close(self) -> None:
        """Finish what is being written."""
        self._executor.shutdown()

    def _room(self, name: str, own: Tensor) -> Tensor:
        room = self._memory.get(name)
        if room is None or room.shape != own.shape or room.dtype != own.dtype:
            pinned = own.device.type == "cuda"  # so that the copy runs at the bus's speed
            room = torch.empty(own.shape, dtype=own.dtype, pin_memory=pinned)
            self._memory[name] = room
        return room


def shard_path(scratch: Path, rank: int) -> Path:
    """Where a rank writes its file."""
    return scratch / file_name(rank)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
