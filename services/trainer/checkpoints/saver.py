"""When a checkpoint is made, and how the ranks make it together.

Rank 0 decides, and has the others join in. All copy their share, which is what training waits for;
then their threads write. Each of the others leaves a note in the ranks' store when the disk has its
file. When rank 0 has seen all notes, it writes the index and gives the checkpoint its name.

Every other host has a folder of its own: its first rank makes it, and gets the index from rank 0.
Rank 0 gives its part a name only when all hosts have done so: what it has, all have.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from umbra.proto.errors import UmbraError
from umbra.services.modeling.safetensors_file import Stored, Written, write_safetensors
from umbra.services.process.files import DISK, FILE_MODE, Disk
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    FileInfo,
    Index,
    TensorInfo,
    file_name,
)
from umbra.services.trainer.checkpoints.parts import CheckpointPart
from umbra.services.trainer.checkpoints.reading import NAMES
from umbra.services.trainer.distributed.heartbeat import RankMessages
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.snapshot import own_rows

log = logging.getLogger(__name__)


class _Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a rank's file, of its host's folder, or of the checkpoint."""

    file: FileInfo | None = None
    index: Index | None = None
    error: str = ""


def join_in(
    folder: CheckpointFolder, writer: ShardWriter, ranks: Ranks, step: int, kept: list[int]
) -> None:
    """All ranks but the first: copy now, write later, leave a note.

    Args:
        folder: of this rank's host.
        kept: the steps of the checkpoints that rank 0 keeps so far.
    """
    copy = writer.copy()
    messages = _CopyMessages(ranks, writer.copies)
    place = ranks.hosts.place
    first = place.ranks_on(ranks.node)[0]

    def write() -> None:
        if ranks.rank == first:
            messages.put("folder", _reported(lambda: _make(folder, step, kept)))
        elif ranks.node and (error := messages.get(first, "folder", "its folder").error):
            messages.put("file", _Report(error=error))
            return
        path = shard_path(folder.scratch(step), ranks.rank)
        messages.put("file", _reported(lambda: _Report(file=copy.write(path, folder.disk))))
        if ranks.rank == first:
            messages.put("named", _reported(lambda: _finish(folder, messages)))

    writer.start(write)


def _make(folder: CheckpointFolder, step: int, kept: list[int]) -> _Report:
    if kept:
        folder.keep_only(kept)
    folder.begin(step)
    return _Report()


def _finish(folder: CheckpointFolder, messages: _CopyMessages) -> _Report:
    note = messages.get(0, "index", "the index of a checkpoint")
    if note.index is None:
        folder.discard()
        return note
    folder.finish(note.index)
    return _Report()


def _reported(work: Callable[[], _Report]) -> _Report:
    """What `work` says, or why it could not be done."""
    try:
        return work()
    except OSError as error:
        return _Report(error=error.strerror or str(error))
    except Exception as error:  # noqa: BLE001 - rank 0 waits for a note, whatever it is
        return _Report(error=f"{type(error).__name__}: {error}")


class _CopyMessages:
    """What the ranks tell each other of one checkpoint, in their store.

    Args:
        number: of the copy; all ranks count theirs alike.
    """

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks = ranks
        self._number = number

    def put(self, what: str, note: _Report) -> None:
        """Tell something, once."""
        self._messages.put(self._named(what), msgspec.json.encode(note).decode())

    def get(self, rank: int, what: str, awaited: str) -> _Report:
        """What `rank` tells.

        Raises:
            DeadlineError: it is silent.
        """
        return msgspec.json.decode(
            self._messages.get(rank, self._named(what), awaited), type=_Report
        )

    def get_all(self, members: list[int], what: str, awaited: str) -> list[_Report]:
        """What these ranks tell, which is forgotten then.

        Raises:
            UmbraError: one could not do it, or is silent.
        """
        notes = [self.get(rank, what, awaited) for rank in members]
        self.forget(members, what)
        for rank, note in zip(members, notes, strict=True):
            if note.error:
                raise UmbraError(f"{self._ranks.hosts.describe(rank)}: {note.error}")
        return notes

    def forget(self, members: list[int], what: str) -> None:
        """Keep the store small: nobody asks for it any more."""
        if members:
            self._messages.forget(members, self._named(what))

    @property
    def _messages(self) -> RankMessages:
        """Only asked for where there are other ranks, and so a store."""
        ranks = self._ranks
        assert ranks.store is not None
        return RankMessages(ranks.store, ranks.rank, ranks.heartbeat)

    def _named(self, what: str) -> str:
        return f"{what} of copy {self._number}"


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What came of a checkpoint."""

    step: int
    error: str  # why there is none; empty if there is
    size: int  # bytes
    copy_s: float  # what training waited
    write_s: float  # from the copy until it had its name


class Saver:
    """Rank 0's side.

    Args:
        every: steps between checkpoints; 0 = none.
        begun: the step of the checkpoint that training went on from.
        run: id of the run, for the index.
        config: of the run, for the index.
        order: has the other ranks join in, given the step and those of the checkpoints so far.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        writer: ShardWriter,
        ranks: Ranks,
        *,
        every: int,
        begun: int,
        run: str,
        config: dict[str, Any],
        order: Callable[[int, list[int]], object],
    ) -> None:
        self.folder = folder
        self._writer = writer
        self._ranks = ranks
        self._every = every
        self.begun = begun  # the last step of which there is one, or one is being made
        self._run = run
        self._config = config
        self._order = order
        self._writing: Future[SaveOutcome] | None = None
        self._outcomes: list[SaveOutcome] = []
        self._late = False

    def after(self, step: int, row: Row) -> None:
        """Begin a checkpoint of `step`, which has just been committed, if it is time to.

        While the one before is still being written none is begun, so that training never waits for
        the disk; this is told once, and made up for as soon as possible.
        """
        if not self._every or step // self._every <= self.begun // self._every:
            return
        self._collect()
        if self._writing is not None:
            if not self._late:
                self._late = True
                log.warning(
                    "step %d: the checkpoint of step %d is still being written: the disk is slower "
                    "than checkpoint.every = %d asks for; the next one is put off until it is done",
                    step,
                    self.begun,
                    self._every,
                )
            return
        self._begin(step, row)

    def wanted(self, step: int, row: Row) -> bool:
        """Begin a checkpoint of `step` because somebody wants one; False if there is one."""
        self._collect()
        if self._writing is None:
            if step in self.folder.steps():
                return False
            self._begin(step, row)
        return True

    def settled(self) -> list[SaveOutcome]:
        """What came of checkpoints, each once and when that is known."""
        self._collect()
        found, self._outcomes = self._outcomes, []
        return found

    def last(self, step: int, row: Row | None) -> list[SaveOutcome]:
        """Finish the one under way, and make one of `step`, at which training ends."""
        self._collect(wait=True)
        if self._every and row is not None and step > self.begun:
            self._begin(step, row)
            self._collect(wait=True)
        return self.settled()

    def _collect(self, *, wait: bool = False) -> None:
        """Take what has come of the one under way; to `wait` takes the disk's time, no more."""
        if self._writing is not None and (wait or self._writing.done()):
            self._outcomes.append(self._writing.result())
            self._writing = None

    def _begin(self, step: int, row: Row) -> None:
        self.begun, self._late = step, False
        began = time.perf_counter()
        try:
            scratch = self.folder.begin(step)
        except OSError as error:
            reason = f"{self.folder.path} cannot be written to: {error.strerror}"
            self._writing = Future()
            self._writing.set_result(SaveOutcome(step, reason, 0, 0.0, 0.0))
            return
        self._order(step, self.folder.steps())
        copy = self._writer.copy()
        metrics = {name: value for name, value in row.items() if value is not None}
        self._writing = self._writer.start(
            lambda: self._write(step, metrics, scratch, copy, self._writer.copy_s, began)
        )

    def _write(
        self,
        step: int,
        metrics: Mapping[str, float],
        scratch: Path,
        copy: ShardCopy,
        copy_s: float,
        began: float,
    ) -> SaveOutcome:
        """In the thread: write, wait for the others, name it, remove old ones."""
        ranks, messages = self._ranks, _CopyMessages(self._ranks, self._writer.copies)
        place = ranks.hosts.place
        others = list(range(1, ranks.world))
        firsts = [place.ranks_on(node)[0] for node in range(1, place.nodes)]
        told = False
        try:
            mine = copy.write(shard_path(scratch, 0), self.folder.disk)
            noted = messages.get_all(others, "file", "its part of a checkpoint")
            files = [mine, *(note.file for note in noted if note.file is not None)]
            index = Index(
                step=step,
                run=self._run,
                saved_at=time.time(),
                config=self._config,
                metrics=dict(metrics),
                tensors=copy.layout,
                files=files,
                holders=ranks.holders,
                hosts=list(ranks.hosts.names) if place.nodes > 1 else [],
            )
            if firsts:
                told = True
                messages.put("index", _Report(index=index))
                messages.get_all(firsts, "named", "its folder of a checkpoint")
                messages.forget(firsts, "folder")
                messages.forget([0], "index")
            self.folder.finish(index)
            self.folder.prune()
        except (OSError, UmbraError) as error:
            self.folder.discard()
            reason = getattr(error, "strerror", None) or str(error)
            if firsts and not told:
                messages.put("index", _Report(error=reason))
            return SaveOutcome(step, reason, 0, copy_s, time.perf_counter() - began)
        size = sum(file.size for file in files)
        return SaveOutcome(step, "", size, copy_s, time.perf_counter() - began - copy_s)


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
