"""When a checkpoint is made, and how the ranks make it together.

Rank 0 decides, and has the others join in. All copy their share, which is what training waits for;
then their threads write. Each of the others leaves a note in the ranks' store when the disk has its
file. When rank 0 has seen all notes, it writes the index and gives the checkpoint its name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.index import FileInfo, Index
from umbra.services.trainer.checkpoints.shard_writer import ShardCopy, ShardWriter, shard_path
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


class _Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a rank's file."""

    file: FileInfo | None = None
    error: str = ""


def join_in(writer: ShardWriter, scratch: Path, ranks: Ranks) -> None:
    """All ranks but the first: copy now, write later, leave a note."""
    copy, number = writer.copy(), writer.copies
    store = ranks.store
    assert store is not None

    def write() -> None:
        try:
            note = _Note(file=copy.write(shard_path(scratch, ranks.rank)))
        except OSError as error:
            note = _Note(error=error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - rank 0 waits for a note, whatever it is
            note = _Note(error=f"{type(error).__name__}: {error}")
        store.set(_key(number, ranks.rank), msgspec.json.encode(note).decode())

    writer.start(write)


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
        order: has the other ranks join in, writing to this folder.
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
        order: Callable[[Path], object],
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
        self._order(scratch)
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
        try:
            mine = copy.write(shard_path(scratch, 0), self.folder.disk)
            files = [mine, *self._others()]
            index = Index(
                step=step,
                run=self._run,
                saved_at=time.time(),
                config=self._config,
                metrics=dict(metrics),
                tensors=copy.layout,
                files=files,
            )
            self.folder.finish(index)
            self.folder.prune()
        except (OSError, UmbraError) as error:
            self.folder.discard()
            reason = getattr(error, "strerror", None) or str(error)
            return SaveOutcome(step, reason, 0, copy_s, time.perf_counter() - began)
        size = sum(file.size for file in files)
        return SaveOutcome(step, "", size, copy_s, time.perf_counter() - began - copy_s)

    def _others(self) -> list[FileInfo]:
        """What the other ranks noted.

        Raises:
            UmbraError: one could not write, or is silent.
        """
        notes: list[_Note] = []
        for rank in range(1, self._ranks.world):
            ask = partial(self._note, _key(self._writer.copies, rank))
            content = self._ranks.pulse.wait(rank, ask, "its part of a checkpoint")
            notes.append(msgspec.json.decode(content, type=_Note))
        for rank, note in enumerate(notes, start=1):
            if note.file is None:
                raise UmbraError(f"trainer rank {rank}: {note.error}")
        return [note.file for note in notes if note.file is not None]

    def _note(self, key: str) -> bytes | None:
        store = self._ranks.store
        assert store is not None
        if not store.check([key]):
            return None
        content = store.get(key)
        store.delete_key(key)
        return content


def _key(number: int, rank: int) -> str:
    """Where a rank leaves its note; all ranks count their copies alike."""
    return f"note of copy {number}/{rank}"
