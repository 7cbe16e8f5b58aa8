"""When a checkpoint is made, and how the ranks make it together.

Rank 0 decides, and has the others join in. All copy their share, which is what training waits for;
then their threads write. Each of the others leaves a note in the ranks' store when the disk has its
file. When rank 0 has seen all notes, it writes the index and gives the checkpoint its name.

Every other host has a folder of its own: its first rank makes it, and gets the index from rank 0.
Rank 0 gives its part a name only when all hosts have done so: what it has, all have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.index import FileInfo, Index
from umbra.services.trainer.checkpoints.shard_writer import ShardCopy, ShardWriter, shard_path
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.notes import Notes
from umbra.services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


class _Note(msgspec.Struct, frozen=True, omit_defaults=True):
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
    notes = _CopyNotes(ranks, writer.copies)
    place = ranks.hosts.place
    first = place.ranks_on(ranks.node)[0]

    def write() -> None:
        if ranks.rank == first:
            notes.leave("folder", _noted(lambda: _make(folder, step, kept)))
        elif ranks.node and (error := notes.of(first, "folder", "its folder").error):
            notes.leave("file", _Note(error=error))
            return
        path = shard_path(folder.scratch(step), ranks.rank)
        notes.leave("file", _noted(lambda: _Note(file=copy.write(path, folder.disk))))
        if ranks.rank == first:
            notes.leave("named", _noted(lambda: _finish(folder, notes)))

    writer.start(write)


def _make(folder: CheckpointFolder, step: int, kept: list[int]) -> _Note:
    if kept:
        folder.keep_only(kept)
    folder.begin(step)
    return _Note()


def _finish(folder: CheckpointFolder, notes: _CopyNotes) -> _Note:
    note = notes.of(0, "index", "the index of a checkpoint")
    if note.index is None:
        folder.discard()
        return note
    folder.finish(note.index)
    return _Note()


def _noted(work: Callable[[], _Note]) -> _Note:
    """What `work` says, or why it could not be done."""
    try:
        return work()
    except OSError as error:
        return _Note(error=error.strerror or str(error))
    except Exception as error:  # noqa: BLE001 - rank 0 waits for a note, whatever it is
        return _Note(error=f"{type(error).__name__}: {error}")


class _CopyNotes:
    """What the ranks tell each other of one checkpoint, in their store.

    Args:
        number: of the copy; all ranks count theirs alike.
    """

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks = ranks
        self._number = number

    def leave(self, what: str, note: _Note) -> None:
        """Tell something, once."""
        self._notes.leave(self._named(what), msgspec.json.encode(note).decode())

    def of(self, rank: int, what: str, awaited: str) -> _Note:
        """What `rank` tells.

        Raises:
            DeadlineError: it is silent.
        """
        return msgspec.json.decode(self._notes.of(rank, self._named(what), awaited), type=_Note)

    def all_of(self, members: list[int], what: str, awaited: str) -> list[_Note]:
        """What these ranks tell, which is forgotten then.

        Raises:
            UmbraError: one could not do it, or is silent.
        """
        notes = [self.of(rank, what, awaited) for rank in members]
        self.forget(members, what)
        for rank, note in zip(members, notes, strict=True):
            if note.error:
                raise UmbraError(f"{self._ranks.hosts.describe(rank)}: {note.error}")
        return notes

    def forget(self, members: list[int], what: str) -> None:
        """Keep the store small: nobody asks for it any more."""
        if members:
            self._notes.forget(members, self._named(what))

    @property
    def _notes(self) -> Notes:
        """Only asked for where there are other ranks, and so a store."""
        ranks = self._ranks
        assert ranks.store is not None
        return Notes(ranks.store, ranks.rank, ranks.pulse)

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
        ranks, notes = self._ranks, _CopyNotes(self._ranks, self._writer.copies)
        place = ranks.hosts.place
        others = list(range(1, ranks.world))
        firsts = [place.ranks_on(node)[0] for node in range(1, place.nodes)]
        told = False
        try:
            mine = copy.write(shard_path(scratch, 0), self.folder.disk)
            noted = notes.all_of(others, "file", "its part of a checkpoint")
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
                notes.leave("index", _Note(index=index))
                notes.all_of(firsts, "named", "its folder of a checkpoint")
                notes.forget(firsts, "folder")
                notes.forget([0], "index")
            self.folder.finish(index)
            self.folder.prune()
        except (OSError, UmbraError) as error:
            self.folder.discard()
            reason = getattr(error, "strerror", None) or str(error)
            if firsts and not told:
                notes.leave("index", _Note(error=reason))
            return SaveOutcome(step, reason, 0, copy_s, time.perf_counter() - began)
        size = sum(file.size for file in files)
        return SaveOutcome(step, "", size, copy_s, time.perf_counter() - began - copy_s)
