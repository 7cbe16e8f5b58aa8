"""Save checkpoints beside the training.

All ranks call the same methods in one order. Each copies its rows, which is all that training waits
for, and a thread writes them. Between two later steps the ranks tell each other whether their files
are on the disk; once all are, the checkpoint gets its name on every host.

`torch.distributed.checkpoint` (DCP) plans which rows a rank writes and reads. The files are ours:
those of DCP are read without a checksum (of 9,769 bits of one, 8,197 could be changed and wrong
numbers were loaded), and its index and the exchange of its plans are pickles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    FileInfo,
    Index,
    SavedPiece,
    TensorInfo,
    file_name,
)
from umbra.services.trainer.checkpoints.parts import CheckpointPart
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.metrics import Row

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # of one write, so that the thread holds up no other
POLL_S = 0.05  # while all ranks wait for their disks


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a checkpoint."""

    step: int
    error: str  # why there is none; empty if there is
    size: int  # bytes
    copy_s: float  # what training waited
    write_s: float  # from the copy until it had its name


class _Report(msgspec.Struct, frozen=True):
    """What a rank wrote, or why it could not."""

    file: FileInfo
    error: str = ""


@dataclass(frozen=True)
class _Writing:
    """A checkpoint under way."""

    step: int
    metrics: dict[str, float]
    tensors: dict[str, TensorInfo]
    report: Future[_Report]
    copy_s: float
    began: float


class Saver:
    """Decides when checkpoints are made, and makes them.

    Args:
        parts: what is saved, by name.
        every: steps between checkpoints; 0 = none.
        begun: the step of the checkpoint that training went on from.
        run: id of the run, for the index.
        config: of the run, for the index.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        parts: Mapping[str, CheckpointPart],
        ranks: Ranks,
        *,
        every: int,
        begun: int,
        run: str,
        config: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.begun = begun  # the last step of which there is a checkpoint, or one is being made
        self._parts = parts
        self._ranks = ranks
        self._every = every
        self._saved = begun  # the last step of which there is one
        self._run = run
        self._config = config
        self._leads = ranks.leads_host
        self._late = False
        self._writing: _Writing | None = None
        self._outcomes: list[SaveOutcome] = []
        self._memory: dict[MetadataIndex, Tensor] = {}  # of the copies, used again and again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-checkpoint")

    @property
    def under_way(self) -> bool:
        return self._writing is not None

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
                step,
                self.begun,
                self._every,
            )

    def wanted(self, step: int, row: Row) -> bool:
        """Begin a checkpoint of `step` on request; False if there is one."""
        self._settle()
        if self._writing is None:
            if step == self._saved:
                return False
            self._begin(step, row)
        return True

    def settled(self) -> list[SaveOutcome]:
        """Return the outcomes of checkpoints, each once and when it is known."""
        self._settle()
        found, self._outcomes = self._outcomes, []
        return found

    def last(self, step: int, row: Row | None) -> list[SaveOutcome]:
        """Finish the one under way, and make one of `step`, at which training ends."""
        self._settle(wait=True)
        if self._every and row is not None and step > self.begun:
            self._begin(step, row)
            self._settle(wait=True)
        return self.settled()

    def close(self) -> None:
        """End the thread, after what it is writing; one rank alone still names that."""
        if self._ranks.world == 1:
            self._settle(wait=True)
        self._thread.shutdown()

    def _begin(self, step: int, row: Row) -> None:
        self.begun, self._late = step, False
        began, error = time.perf_counter(), ""
        if self._leads:
            try:
                self.folder.begin(step)
            except OSError as fault:
                error = f"{self.folder.path} cannot be written to: {fault.strerror}"
        if error := self._first_error(error):
            self._outcomes.append(SaveOutcome(step, error, 0, 0.0, 0.0))
            return
        tensors, plan, rows = self._copy()
        facts = {name: dict(part.facts()) for name, part in self._parts.items()}
        copy_s = time.perf_counter() - began
        report = self._thread.submit(self._write, step, plan, rows, facts)
        metrics = {name: value for name, value in row.items() if value is not None}
        self._writing = _Writing(step, metrics, tensors, report, copy_s, began)

    @torch.no_grad()
    def _copy(self) -> tuple[dict[str, TensorInfo], list[WriteItem], list[Tensor]]:
        """Copy the rows that this rank writes to host memory.

        Of a tensor that all ranks hold whole rank 0 writes it, of replicas the first one.
        """
        tensors: dict[str, TensorInfo] = {}
        written: dict[str, Tensor] = {}
        for part_name, part in self._parts.items():
            for name, tensor in part.tensors().items():
                full = f"{part_name}/{name}"
                tensors[full] = TensorInfo(
                    list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                )
                holders = self._ranks.holders if isinstance(tensor, DTensor) else 1
                if self._ranks.rank < holders:
                    written[full] = tensor
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(written, is_coordinator=True)
        plan: list[WriteItem] = []
        copies: list[Tensor] = []
        for item in planner.create_local_plan().items:
            rows = planner.resolve_data(item)
            assert isinstance(rows, Tensor)
            if rows.numel():
                plan.append(item)
                copies.append(self._room(item.index, rows).copy_(rows, non_blocking=True))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tensors, plan, copies

    def _room(self, index: MetadataIndex, rows: Tensor) -> Tensor:
        room = self._memory.get(index)
        if room is None or room.shape != rows.shape or room.dtype != rows.dtype:
            pinned = rows.device.type == "cuda"  # so that the copy runs at the bus's speed
            room = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
            self._memory[index] = room
        return room

    def _write(
        self, step: int, plan: list[WriteItem], rows: list[Tensor], facts: dict[str, Any]
    ) -> _Report:
        """In the thread: write the file of this rank, and return when the disk has it."""
        disk, pieces, at = self.folder.disk, list[SavedPiece](), 0
        path = self.folder.scratch(step) / file_name(self._ranks.rank)
        try:
            with disk.opened(path, new=True) as fd:
                for item, tensor in zip(plan, rows, strict=True):
                    content = tensor.reshape(-1).view(torch.uint8).numpy().data
                    checksum, first = xxhash.xxh3_64(), item.index.offset or ()
                    for start in range(0, len(content), PIECE_BYTES):
                        some = content[start : start + PIECE_BYTES]
                        disk.write_all(fd, some, at + start)
                        checksum.update(some)
                    shape, digest = list(tensor.shape), checksum.intdigest()
                    pieces.append(SavedPiece(item.index.fqn, list(first), shape, at, digest))
                    at += len(content)
                disk.sync(fd)
        except Exception as error:  # noqa: BLE001 - rank 0 reports it, whatever it is
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return _Report(FileInfo(0, [], {}), reason)
        return _Report(FileInfo(at, pieces, facts))

    def _settle(self, *, wait: bool = False) -> None:
        """Name the checkpoint under way if all ranks have written theirs."""
        writing, ranks = self._writing, self._ranks
        if writing is None:
            return
        while int(ranks.sum_ranks(torch.tensor(int(writing.report.done())))) < ranks.world:
            if not wait:
                return
            time.sleep(POLL_S)
        self._writing = None
        mine = msgspec.json.encode(writing.report.result())
        reports = [msgspec.json.decode(one, type=_Report) for one in ranks.collect(mine)]
        errors = [self._described(rank, one.error) for rank, one in enumerate(reports) if one.error]
        error = "; ".join(errors) or self._name(writing, [one.file for one in reports])
        spent = time.perf_counter() - writing.began - writing.copy_s
        if error:
            if self._leads:
                self.folder.discard()
            self._outcomes.append(SaveOutcome(writing.step, error, 0, writing.copy_s, spent))
            return
        self._saved = writing.step
        size = sum(one.file.size for one in reports)
        self._outcomes.append(SaveOutcome(writing.step, "", size, writing.copy_s, spent))

    def _name(self, writing: _Writing, files: list[FileInfo]) -> str:
        """Give the checkpoint its name on all hosts, the first one last; return an error."""
        ranks = self._ranks
        hosts = ranks.hosts
        content = b""
        if ranks.rank == 0:
            index = Index(
                step=writing.step,
                run=self._run,
                saved_at=time.time(),
                config=self._config,
                metrics=writing.metrics,
                tensors=writing.tensors,
                files=files,
                hosts=list(hosts.names) if hosts.place.nodes > 1 else [],
            )
            content = msgspec.json.encode(index)
        index = msgspec.json.decode(ranks.spread(content, 0), type=Index)
        for turn in [True, False] if hosts.place.nodes > 1 else [False]:
            error = ""
            if self._leads and (ranks.node > 0) == turn:
                try:
                    self.folder.finish(index)
                    self.folder.prune()
                except OSError as fault:
                    error = fault.strerror or str(fault)
            if error := self._first_error(error):
                return error
        return ""

    def _first_error(self, error: str) -> str:
        """Return the first error of any rank, if one has one."""
        found = [one.decode() for one in self._ranks.collect(error.encode())]
        return next((self._described(r, one) for r, one in enumerate(found) if one), "")

    def _described(self, rank: int, error: str) -> str:
        return f"{self._ranks.hosts.describe(rank)}: {error}" if self._ranks.world > 1 else error
