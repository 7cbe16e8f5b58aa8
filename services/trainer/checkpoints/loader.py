"""Resume from the newest checkpoint that is whole, on any number of ranks and hosts.

Every rank reads the rows that it holds. Those in files that its host lacks are broadcast by a rank
that has them. Where rows are read their checksum is compared; if one is wrong, all ranks turn to
the checkpoint before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    DamagedError,
    Index,
    SavedRows,
    file_name,
)
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.snapshot import PIECE_BYTES, as_bytes, held_rows

log = logging.getLogger(__name__)

SHOWN = 4  # faults in an error


def resume(folder: CheckpointFolder, models: Sequence[ModelState], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `models`; return its step, or 0 where there is none.

    Those after it are named and set aside. All ranks call this together.
    """
    faults: dict[int, str] = {}
    mine = msgspec.json.encode(folder.seen() if ranks.leads_host else [])
    steps = {s for some in ranks.collect(mine) for s in msgspec.json.decode(some, type=list[int])}
    for step in sorted(steps, reverse=True):
        try:
            saved = Saved.open(folder, step, ranks)
            for model in models:
                model.load(saved)
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

    `facts` are what this rank saved besides tensors; if there were fewer ranks, the last one.
    """

    def __init__(self, folder: CheckpointFolder, index: Index, ranks: Ranks | None = None) -> None:
        self.directory = folder.of(index.step)
        self.source = f"checkpoint {self.directory}"  # in errors
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
        """Open the checkpoint of `step` that was saved last, whichever hosts have it."""
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

        Missing or damaged rows are a DamagedError on all ranks alike.
        """
        error, wanted = "", dict[int, dict[int, tuple[Tensor, int]]]()  # by file and place in it
        for name, place in places.items():
            own, first = held_rows(name, place)
            own = own if own.dim() else own.view(1)
            missing = len(own) if own.numel() else 0
            for number, rows in self._rows.get(name, ()) if missing else ():
                start, end = max(first, rows.first), min(first + len(own), rows.first + rows.count)
                if start < end:
                    missing -= end - start
                    to = own[start - first : end - first]
                    wanted.setdefault(number, {})[rows.at] = to, start - rows.first
            if missing:
                error = f"{self.directory}: {missing} rows of {name} are missing"
        sources = self._sources(set(wanted))
        for number in sorted({*wanted, *sources}):
            for rows in self.index.files[number].rows:
                mine = wanted.get(number, {}).get(rows.at)
                source = sources.get(number) if rows.name in places else None
                if source is None and mine is None:
                    continue
                info = self.index.tensors[rows.name]
                stored = torch.empty([rows.count, *info.shape[1:]], dtype=_dtype(info.dtype))
                if source is None or source == self._ranks.rank:
                    error = error or self._read(number, rows, stored)
                if source is not None:
                    self._broadcast(as_bytes(stored), source)
                if mine is not None:
                    to, skipped = mine
                    to.copy_(stored[skipped : skipped + len(to)])
        if found := next((one for one in self._ranks.collect(error.encode()) if one), b""):
            raise DamagedError(found.decode())

    def _read(self, number: int, rows: SavedRows, stored: Tensor) -> str:
        """Read `rows` of a file into `stored`; return what is wrong with them."""
        path = self._paths.get(number, self.directory / file_name(number))
        content = as_bytes(stored).numpy().data
        try:
            with path.open("rb") as file:
                file.seek(rows.at)
                if file.readinto(content) < len(content):
                    return f"{path}: it is cut off"
        except OSError as error:
            return f"{path}: {error}"
        if xxhash.xxh3_64_intdigest(content) != rows.checksum:
            return f"{path}: the checksum of {rows.name} is wrong"
        return ""

    def _broadcast(self, content: Tensor, source: int) -> None:
        """Give all ranks the bytes that rank `source` has.

        That is rare (a host is new, or there are more or fewer), so no rank is addressed alone.
        """
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            own = piece.numpy().tobytes() if self._ranks.rank == source else b""
            told = self._ranks.spread(own, source)
            piece.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))

    def _sources(self, wanted: set[int]) -> dict[int, int]:
        """Return the files that hosts lack, each with a rank that has it, or raise DamagedError."""
        mine = msgspec.json.encode((wanted - set(self._paths), set(self._paths)))
        kind = tuple[set[int], set[int]]  # that are missing on a rank's host, and are there
        told = [msgspec.json.decode(one, type=kind) for one in self._ranks.collect(mine)]
        missing = sorted({number for lacks, _ in told for number in lacks})
        sources = {n: [r for r, (_, there) in enumerate(told) if n in there] for n in missing}
        if lost := [number for number in missing if not sources[number]]:
            names = [f"there is no {self.index.describe(n)} in {self.directory}" for n in lost]
            more = f", and {len(lost) - SHOWN} more files" if len(lost) > SHOWN else ""
            raise DamagedError("; ".join(names[:SHOWN]) + more)
        return {number: ranks[0] for number, ranks in sources.items()}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamagedError(f"no tensor has the type {name!r}")
    return found
