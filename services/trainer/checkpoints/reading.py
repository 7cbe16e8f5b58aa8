"""Reading a checkpoint, on any number of ranks and hosts: each takes the rows that it holds itself.

Rows in files that its host does not have come from a rank whose host does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from umbra.services.trainer.checkpoints.folder import DamagedError, Index
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.snapshot import PIECE_BYTES, as_bytes, held_rows

# Safetensors' names of what optimizers and models keep.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WINDOW_BYTES = 256 << 20  # of a tensor, after which the ranks wait for each other


class _Content(msgspec.Struct, frozen=True):
    """What is in a file: what its rank had besides tensors, by part, and which rows of them."""

    facts: dict[str, Any]
    rows: dict[str, tuple[int, int]]


class Saved:
    """An open checkpoint; a context manager. All ranks open it, and load the same in one order.

    Args:
        directory: of the checkpoint, for errors.
        paths: of the files that this host has, by number; they are whole.
        ranks: who reads it.
        seen: by node the numbers of the files that it has; none = all have all.

    Raises:
        DamagedError: a file cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        index: Index,
        paths: Mapping[int, Path],
        ranks: Ranks | None = None,
        seen: Sequence[AbstractSet[int]] = (),
    ) -> None:
        self.directory = directory
        self.index = index
        self._ranks = ranks or Ranks()
        self._seen = seen
        self._stack = ExitStack()
        self._files: dict[int, Any] = {}
        try:
            for number, path in paths.items():
                self._files[number] = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise DamagedError(f"{directory} cannot be read: {error}") from error
        # Files whose rows some host has to get from another one.
        self._sent = [n for n in index.with_rows if any(n not in those for those in seen)]
        self._contents = self._all_contents()

    def __enter__(self) -> Saved:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def part(self, name: str) -> SavedPart:
        """What is saved under the name of a part; nothing, if there was no such part."""
        return SavedPart(self, name)

    def facts(self, part: str) -> dict[str, Any]:
        """What this rank saved of `part` besides tensors.

        The last one's, if there were fewer; the first one's, if its file is lost.
        """
        number = min(self._ranks.rank, self.index.world - 1)
        found = self._contents.get(number) or self._contents[0]
        return found.facts.get(part, {})

    @torch.no_grad()
    def fill(self, full_name: str, place: Tensor) -> None:
        """Copy what `place` holds of the tensor: its own rows if it is sharded, else all."""
        local, first = held_rows(full_name, place)
        shape = self.index.tensors[full_name].shape
        local = local if shape else local.view(1)
        end = first + (len(local) if local.numel() else 0)
        for number in self._files:
            begin, stop = _common((first, end), self._rows(full_name, number))
            if begin < stop:
                source = self._read(number, full_name, begin, stop)
                local[begin - first : stop - first].copy_(source)
        if self._sent:
            self._exchange(full_name, local, first, end)

    def _rows(self, full_name: str, number: int) -> tuple[int, int]:
        """Which rows of a tensor are in a file; a number by itself is one."""
        return self._contents[number].rows.get(full_name, (0, 0))

    def _read(self, number: int, full_name: str, begin: int, stop: int) -> Tensor:
        """Rows `[begin, stop)` of a tensor, which are in this file."""
        file, (start, _) = self._files[number], self._rows(full_name, number)
        if not self.index.tensors[full_name].shape:
            return file.get_tensor(full_name).view(1)
        return file.get_slice(full_name)[begin - start : stop - start]

    def _exchange(self, full_name: str, local: Tensor, first: int, end: int) -> None:
        """Give other hosts the rows that they hold, and get ours. All ranks do this together."""
        ranks = self._ranks
        ranges: list[list[int]] = ranks.gather_ranks(torch.tensor([first, end])).tolist()
        info = self.index.tensors[full_name]
        stored = DTYPES[info.dtype]
        row = max(1, torch.Size(info.shape[1:]).numel() * stored.itemsize)
        for number in self._sent:
            source = self._source(number)
            for window in _pieces(*self._rows(full_name, number), WINDOW_BYTES // row):
                for reader, wanted in enumerate(ranges):
                    if number in self._seen[ranks.hosts.place.node(reader)]:
                        continue
                    for begin, stop in _pieces(*_common(window, wanted), PIECE_BYTES // row):
                        if ranks.rank == source:
                            rows = self._read(number, full_name, begin, stop).contiguous()
                            dist.send(as_bytes(rows), reader)
                        elif ranks.rank == reader:
                            rows = torch.empty(stop - begin, *info.shape[1:], dtype=stored)
                            dist.recv(as_bytes(rows), source)
                            local[begin - first : stop - first].copy_(rows)
                # Whoever has nothing to do with it waits no longer than for one window at a time.
                ranks.sum_ranks(torch.zeros(1))

    def _source(self, number: int) -> int:
        """The rank that sends what is in a file."""
        place = self._ranks.hosts.place
        node = next(node for node, those in enumerate(self._seen) if number in those)
        return place.ranks_on(node)[number % place.per_host]

    def _all_contents(self) -> dict[int, _Content]:
        """What is in each file that some host has, by number; all hosts know it then."""
        if not self._seen:
            return {number: self._content(number) for number in self._files}
        mine = {n: self._content(n) for n in self._files if self._source(n) == self._ranks.rank}
        found: dict[int, _Content] = {}
        for some in self._ranks.collect(msgspec.json.encode(mine)):
            found |= msgspec.json.decode(some, type=dict[int, _Content])
        return found

    def _content(self, number: int) -> _Content:
        file = self._files[number]
        known: dict[str, str] = file.metadata()
        first: dict[str, int] = json.loads(known.get("first", "{}"))
        rows: dict[str, tuple[int, int]] = {}
        for name in file.keys():
            shape = file.get_slice(name).get_shape()
            count = shape[0] if shape else 1
            rows[name] = first.get(name, 0), first.get(name, 0) + count
        return _Content(json.loads(known["facts"]), rows)


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


def _common(one: tuple[int, int], other: Sequence[int]) -> tuple[int, int]:
    """Rows that are in both ranges; an empty one begins where it ends."""
    begin, stop = max(one[0], other[0]), min(one[1], other[1])
    return (begin, stop) if begin < stop else (0, 0)


def _pieces(begin: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    step = max(1, most)
    return ((at, min(at + step, stop)) for at in range(begin, stop, step))
