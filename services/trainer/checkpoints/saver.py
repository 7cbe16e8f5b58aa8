"""Save checkpoints beside the training.

All ranks call the same methods in one order. Each copies its rows (`snapshot.own_rows`), which is
all that training waits for, and a thread writes them. Between two later steps the ranks tell each
other whether their files are on the disk; once all are, the checkpoint gets its name on every host.

The files are ours: torch.distributed.checkpoint reads its files without a checksum (of 9,769 bits
of one, 8,197 could be changed and wrong numbers were loaded), and pickles its index.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from umbra.services.modeling.gpu_copies import bytes_of
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    FileInfo,
    Index,
    SavedRows,
    TensorInfo,
    file_name,
)
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.snapshot import own_rows

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # of one write, so that the thread holds up no other
POLL_S = 0.05  # while all ranks wait for their disks


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a checkpoint."""

    step: int
    error: str = ""  # why there is none
    size: int = 0  # bytes
    copy_s: float = 0.0  # what training waited
    write_s: float = 0.0  # from the copy until it had its name


class Saver:
    """The saver of checkpoints of `models`, and the decision when.

    `begun` is the step of the checkpoint that training resumed from; `config` the run's, for the
    index.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        models: Sequence[ModelState],
        ranks: Ranks,
        begun: int,
        config: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.begun = begun  # the last step of which there is a checkpoint, or one is being made
        self._saved = begun  # the last step of which there is one
        self._models, self._ranks, self._config = models, ranks, config
        self._every, self._late = folder.config.every, False
        # The checkpoint under way: its index but for the files, what this rank wrote and why it
        # could not, what the copy took, and when it began.
        self._writing: tuple[Index, Future[tuple[FileInfo, str]], float, float] | None = None
        self._outcomes: list[SaveOutcome] = []
        self._memory: dict[str, Tensor] = {}  # of the copies, used again and again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-checkpoint")

    def after(self, step: int, row: Row) -> None:
        """Begin a checkpoint of `step`, which has just been committed, if one is due.

        While the one before is still being written none is begun, so that training never waits for
        the disk; this is logged once, and made up for as soon as possible.
        """
        if not self._every or step // self._every <= self.begun // self._every:
            return
        self._settle()
        if self._writing is None:
            self._begin(step, row)
        elif not self._late:
            self._late = True
            log.warning(
                "step %d: the checkpoint of step %d is still being written: the disk is slower "
                "than checkpoint.every = %d asks for; the next one is put off until it is done",
                *(step, self.begun, self._every),
            )

    def wanted(self, step: int, row: Row) -> None:
        """Begin a checkpoint of `step` on request, unless there is one or one is being made."""
        self._settle()
        if self._writing is None and step != self._saved:
            self._begin(step, row)

    def settled(self) -> list[SaveOutcome]:
        """Return the outcomes of checkpoints, each once and when it is known."""
        self._settle()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def last(self, step: int, row: Row | None) -> list[SaveOutcome]:
        """Finish the one under way, and make one of `step`, at which training ends."""
        self._settle(wait=True)
        if self._every and row is not None and step > self.begun:
            self._begin(step, row)
            self._settle(wait=True)
        return self.settled()

    def close(self) -> None:
        """End the thread after its present write, which a rank alone still publishes."""
        if self._ranks.world == 1:
            self._settle(wait=True)
        self._thread.shutdown()

    def _begin(self, step: int, row: Row) -> None:
        self.begun, self._late = step, False
        began, error = time.perf_counter(), ""
        if self._ranks.leads_host:
            try:
                self.folder.begin(step)
            except OSError as fault:
                error = f"{self.folder.path} cannot be written to: {fault.strerror}"
        if error := self._any_error(error):
            self._outcomes.append(SaveOutcome(step, error))
            return
        tensors, copies = self._copy()
        facts = {model.name: model.facts() for model in self._models}
        copy_s, place = time.perf_counter() - began, self._ranks.place
        report = self._thread.submit(self._write, step, copies, facts)
        index = Index(
            step=step,
            run=self.folder.root.parent.name,
            saved_at=0.0,
            config=self._config,
            metrics={name: value for name, value in row.items() if value is not None},
            tensors=tensors,
            files=[],
            hosts=list(place.hosts) if place.nodes > 1 else [],
        )
        self._writing = index, report, copy_s, began

    @torch.no_grad()
    def _copy(self) -> tuple[dict[str, TensorInfo], dict[str, tuple[int, Tensor]]]:
        """Copy the rows that this rank writes to host memory; return them with their first one."""
        ranks = self._ranks
        tensors: dict[str, TensorInfo] = {}
        copies: dict[str, tuple[int, Tensor]] = {}
        for model in self._models:
            for name, tensor in model.tensors().items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors[name] = TensorInfo(list(tensor.shape), dtype)
                rows, first = own_rows(name, tensor, ranks.rank, ranks.world)
                if not rows.numel():
                    continue
                if name not in self._memory:  # pinned, so that a copy runs at the bus's speed
                    self._memory[name] = torch.empty(
                        rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda
                    )
                copies[name] = first, self._memory[name].copy_(rows, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tensors, copies

    def _write(
        self, step: int, copies: dict[str, tuple[int, Tensor]], facts: dict[str, Any]
    ) -> tuple[FileInfo, str]:
        """Write the file of this rank, in the thread, and return when the disk has it."""
        disk, written, offset = self.folder.disk, list[SavedRows](), 0
        path = self.folder.scratch(step) / file_name(self._ranks.rank)
        try:
            with disk.opened(path, new=True) as fd:
                for name, (first, rows) in copies.items():
                    content, checksum = bytes_of(rows), xxhash.xxh3_64()
                    for start in range(0, len(content), PIECE_BYTES):
                        piece = content[start : start + PIECE_BYTES]
                        disk.write_all(fd, piece, offset + start)
                        checksum.update(piece)
                    count = len(rows) if rows.dim() else 1
                    written.append(SavedRows(name, first, count, offset, checksum.intdigest()))
                    offset += len(content)
                disk.sync(fd)
        except Exception as error:  # noqa: BLE001 - rank 0 reports it, whatever it is
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return FileInfo(0, [], {}), reason
        return FileInfo(offset, written, facts), ""

    def _settle(self, *, wait: bool = False) -> None:
        """Name the checkpoint under way if all ranks have written theirs."""
        ranks = self._ranks
        if self._writing is None:
            return
        index, report, copy_s, began = self._writing
        while int(ranks.sum_ranks(torch.tensor(int(report.done())))) < ranks.world:
            if not wait:
                return
            time.sleep(POLL_S)
        self._writing = None
        file, error = report.result()
        files = ranks.collect(file, FileInfo)
        index = msgspec.structs.replace(index, saved_at=time.time(), files=files)
        error = self._any_error(error) or self._name(ranks.spread(index, Index))
        spent = time.perf_counter() - began - copy_s
        size = 0 if error else sum(file_info.size for file_info in files)
        self._outcomes.append(SaveOutcome(index.step, error, size, copy_s, spent))
        if not error:
            self._saved = index.step
        elif ranks.leads_host:
            self.folder.discard()

    def _name(self, index: Index) -> str:
        """Give the checkpoint its name on all hosts, the first one last; return an error."""
        ranks = self._ranks
        for turn in [True, False] if ranks.place.nodes > 1 else [False]:
            error = ""
            if ranks.leads_host and (ranks.node > 0) == turn:
                try:
                    self.folder.finish(index)
                    self.folder.prune()
                except OSError as fault:
                    error = fault.strerror or str(fault)
            if error := self._any_error(error):
                return error
        return ""

    def _any_error(self, error: str) -> str:
        """Return the errors of all ranks, in one sentence."""
        ranks = self._ranks
        if ranks.world == 1:
            return error
        errors = enumerate(ranks.collect(error, str))
        return "; ".join(f"{ranks.place.describe(rank)}: {each}" for rank, each in errors if each)
