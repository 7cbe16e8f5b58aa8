"""Resume from the newest checkpoint that is whole, on any number of ranks and hosts.

Every rank reads the rows that it holds, as planned by `torch.distributed.checkpoint`. Files that
its host needs and does not have come from a host that has them. Where rows are read their checksum
is compared; if one is wrong, all ranks turn to the checkpoint before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    DamagedError,
    Index,
    file_name,
)
from umbra.services.trainer.distributed.ranks import Ranks

if TYPE_CHECKING:
    from umbra.services.trainer.checkpoints.parts import CheckpointPart

log = logging.getLogger(__name__)

SHOWN = 4  # faults in an error
PIECE_BYTES = 32 << 20  # of a file, in one message
WINDOW_PIECES = 8  # after which the ranks wait for each other


def resume(folder: CheckpointFolder, parts: Mapping[str, CheckpointPart], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `parts`; return its step, or 0 where there is none.

    Those after it are named and set aside. All ranks call this together.

    Raises:
        UsageError: there are checkpoints, but none is whole; or it is of another model.
    """
    faults: dict[int, str] = {}
    if ranks.leads_host:
        folder.mend()
    mine = msgspec.json.encode(folder.seen() if ranks.leads_host else [])
    steps = {s for some in ranks.collect(mine) for s in msgspec.json.decode(some, type=list[int])}
    for step in sorted(steps, reverse=True):
        try:
            saved = Saved.open(folder, step, ranks)
            for name, part in parts.items():
                part.load(saved.part(name))
        except DamagedError as error:
            faults[step] = str(error)
            if ranks.rank == 0:
                log.warning("the checkpoint of step %d is damaged: %s", step, error)
            continue
        for damaged in faults if ranks.leads_host else ():
            if damaged in folder.steps():
                aside = folder.set_aside(damaged)
                log.warning("the checkpoint of step %d is %s now", damaged, aside)
        return step
    if faults:
        newest = max(faults)
        raise UsageError(
            f"none of the checkpoints in {folder.root} is whole (steps "
            f"{', '.join(map(str, sorted(faults)))}); of step {newest}: {faults[newest]}: restore "
            "one from a copy, or remove the folder, on all hosts, to begin at step 1 again"
        )
    return 0


class Saved:
    """An open checkpoint. All ranks open it, and load the same parts in one order.

    Args:
        index: of the checkpoint.
    """

    def __init__(self, folder: CheckpointFolder, index: Index, ranks: Ranks | None = None) -> None:
        self.directory = folder.of(index.step)
        self.index = index
        self._folder = folder
        self._ranks = ranks or Ranks()
        self._paths = folder.find_files(index)
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in index.tensors}
        self._file_of: dict[MetadataIndex, int] = {}
        for number, file in enumerate(index.files):
            for piece in file.pieces:
                first, shape = torch.Size(piece.first), torch.Size(piece.shape)
                chunks[piece.name].append(ChunkStorageMetadata(first, shape))
                self._file_of[MetadataIndex(piece.name, first)] = number
        self._metadata = Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(_dtype(info.dtype)), torch.Size(info.shape), chunks[name]
                )
                for name, info in index.tensors.items()
            }
        )

    @classmethod
    def open(cls, folder: CheckpointFolder, step: int, ranks: Ranks) -> Saved:
        """Open the checkpoint of `step` that was saved last, whichever hosts have it.

        Raises:
            DamagedError: no host has an index that can be read.
        """
        index, error = None, f"{folder.of(step)} is not there"
        try:
            index = folder.newest_index(step)
        except DamagedError as fault:
            error = str(fault)
        times = ranks.gather_ranks(torch.tensor(index.saved_at if index else 0.0).double())
        content = msgspec.json.encode(index or error)
        content = ranks.spread(content, int(times.argmax()))
        found = msgspec.json.decode(content, type=Index | str)
        if isinstance(found, str):
            raise DamagedError(found)
        return cls(folder, found, ranks)

    def part(self, name: str) -> SavedPart:
        """Return what is saved under the name of a part; nothing, if there was no such part.

        Besides tensors that is what this rank saved; if there were fewer ranks, the last one.
        """
        number = min(self._ranks.rank, len(self.index.files) - 1)
        return SavedPart(self, name, self.index.files[number].facts.get(name, {}))

    @torch.no_grad()
    def fill(self, places: dict[str, Tensor]) -> None:
        """Copy the rows of tensors to `places`: of each its own rows if it is sharded, else all.

        Raises:
            DamagedError: a file is missing or damaged; on all ranks alike.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(places, self._metadata)
        by_file: dict[int, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            by_file.setdefault(self._file_of[item.storage_index], []).append(item)
        self._fetch(set(by_file))
        error = ""
        for number, items in by_file.items():
            try:
                self._read(number, items, planner)
            except (OSError, DamagedError) as fault:
                error = error or f"{self._paths[number]}: {fault}"
        if found := next((one for one in self._ranks.collect(error.encode()) if one), b""):
            raise DamagedError(found.decode())

    def _read(self, number: int, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        """Copy the rows of `items`, which are in one file, to their places."""
        pieces = {
            MetadataIndex(one.name, one.first): one for one in self.index.files[number].pieces
        }
        with self._paths[number].open("rb") as file:
            for item in items:
                piece = pieces[item.storage_index]
                stored = torch.empty(
                    piece.shape, dtype=_dtype(self.index.tensors[piece.name].dtype)
                )
                content = stored.view(-1).view(torch.uint8).numpy().data
                file.seek(piece.at)
                if file.readinto(content) < len(content):
                    raise DamagedError("it is cut off")
                if xxhash.xxh3_64_intdigest(content) != piece.checksum:
                    raise DamagedError(f"the checksum of {piece.name} is wrong")
                rows = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(rows)

    def _fetch(self, wanted: set[int]) -> None:
        """Get the files that this host lacks from hosts that have them.

        Raises:
            DamagedError: no host has them; on all ranks alike.
        """
        ranks, place = self._ranks, self._ranks.hosts.place
        mine = [sorted(wanted - set(self._paths)), sorted(self._paths)]
        told: list[list[list[int]]] = [
            msgspec.json.decode(one) for one in ranks.collect(msgspec.json.encode(mine))
        ]
        lost: list[str] = []
        copies: list[tuple[int, int, int]] = []
        for number in range(len(self.index.files)):
            readers = {
                place.ranks_on(place.node(rank))[0]
                for rank, (missing, _) in enumerate(told)
                if number in missing
            }
            sources = [rank for rank, (_, there) in enumerate(told) if number in there]
            if readers and not sources:
                lost.append(f"there is no {self.index.describe(number)} in {self.directory}")
            copies += [(number, sources[0], reader) for reader in sorted(readers) if sources]
        if lost:
            more = f", and {len(lost) - SHOWN} more files" if len(lost) > SHOWN else ""
            raise DamagedError("; ".join(lost[:SHOWN]) + more)
        try:
            for number, source, reader in copies:
                self._send(number, self.index.files[number].size, source, reader)
        except OSError as error:
            raise UmbraError(
                f"files of {self.directory} cannot be copied from another host: {error}"
            ) from error
        if copies:
            self._paths = self._folder.find_files(self.index)

    def _send(self, number: int, size: int, source: int, reader: int) -> None:
        """Copy a file from the host of rank `source` to that of `reader`; all ranks wait."""
        ranks, name = self._ranks, file_name(number)
        part = self.directory / f".{name}"
        with ExitStack() as stack:
            file: Any = None
            if ranks.rank == source:
                file = stack.enter_context(self._paths[number].open("rb"))
            elif ranks.rank == reader:
                self._folder.adopt(self.index)
                file = stack.enter_context(part.open("wb"))
            for turn, at in enumerate(range(0, size, PIECE_BYTES)):
                content = bytearray(min(PIECE_BYTES, size - at)) if file else bytearray()
                if ranks.rank == source:
                    file.readinto(content)
                    dist.send(torch.frombuffer(content, dtype=torch.uint8), reader)
                elif ranks.rank == reader:
                    dist.recv(torch.frombuffer(content, dtype=torch.uint8), source)
                    file.write(content)
                if turn % WINDOW_PIECES == 0:  # nobody waits for longer than a window takes
                    ranks.sum_ranks(torch.zeros(1))
            if ranks.rank == reader:
                file.flush()
                os.fsync(file.fileno())
        if ranks.rank == reader:
            part.rename(self.directory / name)
        ranks.sum_ranks(torch.zeros(1))


class SavedPart:
    """One part of an open checkpoint."""

    def __init__(self, saved: Saved, name: str, facts: dict[str, Any]) -> None:
        self.source = f"checkpoint {saved.directory}"
        self.facts = facts
        self._saved = saved
        self._prefix = f"{name}/"
        self.names = {
            full.removeprefix(self._prefix)
            for full in saved.index.tensors
            if full.startswith(self._prefix)
        }

    def layout(self, name: str) -> tuple[list[int], torch.dtype]:
        """Return shape and dtype of a whole tensor."""
        info = self._saved.index.tensors[self._prefix + name]
        return info.shape, _dtype(info.dtype)

    def fill(self, places: Mapping[str, Tensor]) -> None:
        """Copy rows to `places`; see `Saved.fill`."""
        self._saved.fill({self._prefix + name: place for name, place in places.items()})


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"no tensor has the type {name!r}")
    return found
