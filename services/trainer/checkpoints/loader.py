"""Resume from the newest checkpoint that is whole, on any number of ranks and hosts.

Every rank reads the rows that it holds. Files that its host needs and does not have come from a
host that has them. Where rows are read their checksum is compared; if one is wrong, all ranks turn
to the checkpoint before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
import xxhash
from torch import Tensor

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    DamagedError,
    Index,
    SavedRows,
    file_name,
)
from umbra.services.trainer.checkpoints.state import ModelState, restore_randomness
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.snapshot import as_bytes, held_rows

log = logging.getLogger(__name__)

SHOWN = 4  # faults in an error
PIECE_BYTES = 32 << 20  # of a file, in one message


def resume(folder: CheckpointFolder, models: Sequence[ModelState], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `models`; return its step, or 0 where there is none.

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
            for model in models:
                model.load(saved)
            restore_randomness(saved.facts.get("randomness", {}))
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
    """An open checkpoint. All ranks open it, and fill the same tensors in one order.

    Attributes:
        source: names it in errors.
        facts: what this rank saved besides tensors; if there were fewer ranks, the last one.
    """

    def __init__(self, folder: CheckpointFolder, index: Index, ranks: Ranks | None = None) -> None:
        self.directory = folder.of(index.step)
        self.source = f"checkpoint {self.directory}"
        self.index = index
        self._folder = folder
        self._ranks = ranks or Ranks()
        self._paths = folder.find_files(index)
        self._rows: dict[str, list[tuple[int, SavedRows]]] = {}
        number = min(self._ranks.rank, len(index.files) - 1)
        self.facts: dict[str, Any] = index.files[number].facts
        for number, file in enumerate(index.files):
            for rows in file.rows:
                self._rows.setdefault(rows.name, []).append((number, rows))

    @classmethod
    def open(cls, folder: CheckpointFolder, step: int, ranks: Ranks) -> Saved:
        """Open the checkpoint of `step` that was saved last, whichever hosts have it.

        Raises:
            DamagedError: no host has an index that can be read.
        """
        found: Index | str
        try:
            found = folder.newest_index(step)
        except DamagedError as fault:
            found = str(fault)
        saved_at = found.saved_at if isinstance(found, Index) else 0.0
        times = ranks.gather_ranks(torch.tensor(saved_at).double())
        content = ranks.spread(msgspec.json.encode(found), int(times.argmax()))
        found = msgspec.json.decode(content, type=Index | str)
        if isinstance(found, str):
            raise DamagedError(found)
        return cls(folder, found, ranks)

    def names(self, prefix: str) -> set[str]:
        return {name for name in self.index.tensors if name.startswith(prefix)}

    def layout(self, name: str) -> tuple[list[int], torch.dtype]:
        """Return shape and dtype of a whole tensor."""
        info = self.index.tensors[name]
        return info.shape, _dtype(info.dtype)

    @torch.no_grad()
    def fill(self, places: dict[str, Tensor]) -> None:
        """Copy the rows of tensors to `places`: of each its own rows if it is sharded, else all.

        Raises:
            DamagedError: rows or a file are missing or damaged; on all ranks alike.
        """
        error, wanted = "", list[tuple[int, SavedRows, Tensor, int]]()
        for name, place in places.items():
            own, first = held_rows(name, place)
            own = own if own.dim() else own.view(1)
            missing = len(own) if own.numel() else 0
            for number, rows in self._rows.get(name, ()) if missing else ():
                start, end = max(first, rows.first), min(first + len(own), rows.first + rows.count)
                if start < end:
                    missing -= end - start
                    to = own[start - first : end - first]
                    wanted.append((number, rows, to, start - rows.first))
            if missing:
                error = f"{self.directory}: {missing} rows of {name} are missing"
        self._fetch({number for number, *_ in wanted})
        for number, rows, to, skipped in sorted(wanted, key=lambda one: (one[0], one[1].at)):
            path = self._paths.get(number, self.directory / file_name(number))
            try:
                to.copy_(self._read(path, rows)[skipped : skipped + len(to)])
            except (OSError, DamagedError) as fault:
                error = error or f"{path}: {fault}"
        if found := next((one for one in self._ranks.collect(error.encode()) if one), b""):
            raise DamagedError(found.decode())

    def _read(self, path: Path, rows: SavedRows) -> Tensor:
        info = self.index.tensors[rows.name]
        stored = torch.empty([rows.count, *info.shape[1:]], dtype=_dtype(info.dtype))
        content = as_bytes(stored).numpy().data
        with path.open("rb") as file:
            file.seek(rows.at)
            if file.readinto(content) < len(content):
                raise DamagedError("it is cut off")
        if xxhash.xxh3_64_intdigest(content) != rows.checksum:
            raise DamagedError(f"the checksum of {rows.name} is wrong")
        return stored

    def _fetch(self, wanted: set[int]) -> None:
        """Get the files that hosts lack from one that has them; all ranks are told all of them.

        Raises:
            DamagedError: no host has them; on all ranks alike.
        """
        ranks, place = self._ranks, self._ranks.place
        mine = msgspec.json.encode((wanted - set(self._paths), set(self._paths)))
        kind = tuple[set[int], set[int]]  # that are missing on a rank's host, and are there
        told = [msgspec.json.decode(one, type=kind) for one in ranks.collect(mine)]
        missing = sorted({number for lacks, _ in told for number in lacks})
        sources = {n: [r for r, (_, there) in enumerate(told) if n in there] for n in missing}
        if lost := [number for number in missing if not sources[number]]:
            names = [f"there is no {self.index.describe(n)} in {self.directory}" for n in lost]
            more = f", and {len(lost) - SHOWN} more files" if len(lost) > SHOWN else ""
            raise DamagedError("; ".join(names[:SHOWN]) + more)
        lacks_here = {n for rank in place.ranks_on(ranks.node) for n in told[rank][0]}
        try:
            for number in missing:
                self._copy(number, sources[number][0], ranks.leads_host and number in lacks_here)
        except OSError as error:
            raise UmbraError(
                f"files of {self.directory} cannot be copied from another host: {error}"
            ) from error
        if missing:
            ranks.sum_control(torch.zeros(1))  # all files have their names
            self._paths = self._folder.find_files(self.index)

    def _copy(self, number: int, source: int, keep: bool) -> None:
        """Tell all ranks the content of a file that rank `source` has; those that `keep` it write.

        That is rare (a host is new, or there are more or fewer), so no rank is addressed alone.
        """
        ranks, name = self._ranks, file_name(number)
        part = self.directory / f".{name}"
        with ExitStack() as stack:
            there = ranks.rank == source
            original = stack.enter_context(self._paths[number].open("rb")) if there else None
            copy: IO[bytes] | None = None
            if keep:
                self._folder.adopt(self.index)
                copy = stack.enter_context(part.open("wb"))
            for _ in range(0, self.index.files[number].size, PIECE_BYTES):
                content = ranks.spread(original.read(PIECE_BYTES) if original else b"", source)
                if copy is not None:
                    copy.write(content)
            if copy is not None:
                copy.flush()
                os.fsync(copy.fileno())
                part.rename(self.directory / name)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"no tensor has the type {name!r}")
    return found
