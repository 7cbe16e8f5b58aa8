"""The state in a checkpoint, and its reader, on any number of ranks and hosts.

Tensors are sharded by rows (DTensors) or the same on all ranks; either way each rank saves its
share of the rows, and reads the rows that it holds. Those in files that its host lacks are
broadcast by a rank that has them. If a checksum is wrong, all ranks turn to the checkpoint before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from umbra.proto.errors import UsageError
from umbra.services.modeling.gpu_copies import bytes_of
from umbra.services.modeling.sharded import held_rows, rows_like
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    DamagedError,
    Index,
    SavedRows,
    file_name,
)
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.trainer.optimizer import MasterWeights

log = logging.getLogger(__name__)

SHOWN, SHOWN_FILES = 3, 4  # names, and files, in an error


def resume(folder: CheckpointFolder, models: Sequence[ModelState], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `models`; return its step, or 0 where there is none.

    Those after it are named and set aside. All ranks call this together.

    Raises:
        UsageError: there are checkpoints, but none is whole; or it is of another model.
    """
    faults: dict[int, str] = {}
    steps_by_rank = ranks.collect(folder.seen() if ranks.leads_host else [], list[int])
    steps = {step for steps_of_rank in steps_by_rank for step in steps_of_rank}
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
        for damaged in faults.keys() & set(folder.steps()) if ranks.leads_host else ():
            aside = folder.set_aside(damaged)
            log.warning("the checkpoint of step %d was renamed to %s", damaged, aside)
        return step
    if not faults:
        return 0
    newest = max(faults)
    raise UsageError(
        f"none of the checkpoints in {folder.root} is whole (steps "
        f"{', '.join(map(str, sorted(faults)))}); of step {newest}: {faults[newest]}: restore "
        "one from a copy, or remove the folder, on all hosts, to begin at step 1 again"
    )


class Saved:
    """An open checkpoint. All ranks open it, and fill the same tensors in one order.

    `facts` are what this rank saved besides tensors; if there were fewer ranks, the last one.
    """

    def __init__(self, folder: CheckpointFolder, index: Index, ranks: Ranks | None = None) -> None:
        self.directory = folder.of(index.step)
        self.source = f"checkpoint {self.directory}"  # in errors
        self.index = index
        self._ranks = ranks or Ranks()
        self._paths = folder.find_files(index)
        self.facts: dict[str, Any] = index.files[: self._ranks.rank + 1][-1].facts
        self._rows: dict[str, list[tuple[int, SavedRows]]] = {}
        for number, file in enumerate(index.files):
            for rows in file.rows:
                self._rows.setdefault(rows.name, []).append((number, rows))

    @classmethod
    def open(cls, folder: CheckpointFolder, step: int, ranks: Ranks) -> Saved:
        """Open the checkpoint of `step` that was saved last, whichever hosts have it.

        Raises:
            DamagedError: no host has an index that can be read.
        """
        answer: Index | str
        try:
            answer = folder.newest_index(step)
        except DamagedError as fault:
            answer = str(fault)
        saved_at = answer.saved_at if isinstance(answer, Index) else 0.0
        times = ranks.collect(saved_at, float)
        answer = ranks.spread(answer, Index | str, times.index(max(times)))
        if isinstance(answer, str):
            raise DamagedError(answer)
        return cls(folder, answer, ranks)

    def names(self, prefix: str) -> set[str]:
        return {name for name in self.index.tensors if name.startswith(prefix)}

    def layout(self, name: str) -> tuple[list[int], torch.dtype]:
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
                    target_rows = own[start - first : end - first]
                    wanted.setdefault(number, {})[rows.at] = target_rows, start - rows.first
            if missing:
                error = f"{self.directory}: {missing} rows of {name} are missing"
        sources = self._sources(set(wanted))
        for number in sorted({*wanted, *sources}):
            for rows in self.index.files[number].rows:
                target = wanted.get(number, {}).get(rows.at)
                source = sources.get(number) if rows.name in places else None
                if source is None and target is None:
                    continue
                info = self.index.tensors[rows.name]
                stored = torch.empty([rows.count, *info.shape[1:]], dtype=_dtype(info.dtype))
                if source is None or source == self._ranks.rank:
                    error = error or self._read(number, rows, stored)
                if source is not None:  # rare: a host is new, or there are more or fewer
                    # As bytes: not every backend sends every type.
                    self._ranks.broadcast(stored.view(-1).view(torch.uint8), source)
                if target is not None:
                    target_rows, skipped = target
                    target_rows.copy_(stored[skipped : skipped + len(target_rows)])
        if message := next(filter(None, self._ranks.collect(error, str)), ""):
            raise DamagedError(message)

    def _read(self, number: int, rows: SavedRows, stored: Tensor) -> str:
        """Read `rows` of a file into `stored`; return the fault found, or ""."""
        path = self._paths.get(number, self.directory / file_name(number))
        content = bytes_of(stored)
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

    def _sources(self, needed: set[int]) -> dict[int, int]:
        """Return the files that hosts lack, each with a rank that has it, or raise DamagedError."""
        there = set(self._paths)
        # Of each rank those that its host lacks, and those that it has.
        answers = self._ranks.collect((needed - there, there), tuple[set[int], set[int]])
        owner = {n: rank for rank, (_, has) in reversed([*enumerate(answers)]) for n in has}
        missing = sorted({number for lacks, _ in answers for number in lacks})
        if lost := [number for number in missing if number not in owner]:
            names = [f"there is no {self.index.describe(n)} in {self.directory}" for n in lost]
            more = f", and {len(lost) - SHOWN_FILES} more files" if len(lost) > SHOWN_FILES else ""
            raise DamagedError("; ".join(names[:SHOWN_FILES]) + more)
        return {number: owner[number] for number in missing}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"unknown type of tensors: {name!r}")
    return dtype


class ModelState:
    """The trained parameters of a model, its buffers, and the moments of its optimizer, if any.

    `name` begins the names of its tensors. Frozen parameters stay in the model that the run began
    with; `base` is the checksum of its weights, if there are some, and `alpha` the adapter's.
    `master_weights` are saved in place of parameters; `settle` waits until nothing changes them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        base: str = "",
        alpha: float = 0.0,
        master_weights: MasterWeights | None = None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self._moments = name, f"{name}-optimizer/"
        self._model, self._optimizer, self._base, self._alpha = model, optimizer, base, alpha
        self._master_weights = master_weights or MasterWeights((), None)
        self._settle = settle

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers as `NAME/...`, moments as `NAME-optimizer/PARAMETER.KEY`."""
        self._settle()
        held = {} if self._optimizer is None else self._optimizer.state
        moments = {
            f"{self._moments}{name}.{key}": value
            for name, parameter in self._trained().items()
            for key, value in held.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return {**self._weights(), **moments}

    def facts(self) -> dict[str, Any]:
        kind = type(self._optimizer).__name__
        return {"base": self._base, "alpha": self._alpha, "optimizer": kind}

    @torch.no_grad()
    def load(self, saved: Saved) -> None:
        """Overwrite tensors and facts; UsageError if they are of another model or optimizer."""
        places, trained, optimizer = self._weights(), self._trained(), self._optimizer
        self._check_facts(saved.source, saved.facts.get(self.name, {}))
        self._check_names(saved, places)
        states: dict[Tensor, dict[str, Tensor]] = {}
        for full in sorted(saved.names(self._moments)) if optimizer is not None else ():
            name, _, key = full.removeprefix(self._moments).rpartition(".")
            parameter = trained[name]  # of the same names as the weights
            shape, dtype = saved.layout(full)
            if shape and parameter.dim() and shape[0] == len(parameter):
                place = rows_like(parameter, shape, dtype)
            else:
                place = torch.zeros(shape, dtype=dtype, device=parameter.device)
            places[full] = states.setdefault(parameter, {})[key] = place
        saved.fill(places)
        self._master_weights.push()
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(states)

    def _trained(self) -> dict[str, nn.Parameter]:
        parameters = self._model.named_parameters()
        return {name: self._master_weights.of(p) for name, p in parameters if p.requires_grad}

    def _weights(self) -> dict[str, Tensor]:
        reshard(self._model)
        stored = self._model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in self._model.named_buffers() if name in stored}
        return {f"{self.name}/{name}": t for name, t in {**self._trained(), **buffers}.items()}

    def _check_facts(self, source: str, facts: Mapping[str, Any]) -> None:
        base, own = facts.get("base", ""), type(self._optimizer).__name__
        alpha = facts.get("alpha", self._alpha)
        if (base, alpha) != (self._base, self._alpha):
            fault = f"an adapter of trainer.lora_alpha = {alpha:g}"
            if not self._base:
                fault = "an adapter, but trainer.lora_rank is 0"
            elif not base:
                fault = "all weights, but trainer.lora_rank is above 0"
            elif base != self._base:
                fault = "an adapter for another base model than model.path"
            raise UsageError(f"{source} is of {fault}: set these as before, or begin another run")
        if self._optimizer is not None and facts.get("optimizer", own) != own:
            raise UsageError(
                f"{source} has the state of {facts['optimizer']}, but trainer.optimizer is {own}: "
                "set the optimizer as before"
            )

    def _check_names(self, saved: Saved, own: Mapping[str, Tensor]) -> None:
        there, cut = saved.names(f"{self.name}/"), len(self.name) + 1
        if own and not there:
            key = "trainer.objective and advantage as before, or begin another run"
            raise UsageError(f"{saved.source} has no {self.name}: set {key}")
        faults = [f"it has {name[cut:]}, model.path has not" for name in there if name not in own]
        faults += [f"it has no {name[cut:]}" for name in own if name not in there]
        faults += [
            f"{name[cut:]} is {saved.layout(name)[0]} in it and {list(tensor.shape)} in model.path"
            for name, tensor in own.items()
            if name in there and saved.layout(name)[0] != list(tensor.shape)
        ]
        if faults:
            more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            raise UsageError(
                f"{saved.source} is of another model: {'; '.join(faults[:SHOWN])}{more}; set "
                "model.path and the LoRA keys as before, or begin another run"
            )
