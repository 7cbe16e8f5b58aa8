"""Going on from the newest checkpoint that is whole; all ranks do this together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from umbra.proto.errors import UsageError
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.index import DamagedError, Index, check_files, read_index
from umbra.services.trainer.checkpoints.parts import CheckpointPart
from umbra.services.trainer.checkpoints.reading import Saved
from umbra.services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


def resume(folder: CheckpointFolder, parts: Mapping[str, CheckpointPart], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `parts`; its step, or 0 where there is none.

    Those that are damaged are named and set aside. Any number of ranks may have written it.

    Raises:
        UsageError: there are checkpoints, but none is whole; or it is of another model.
    """
    damaged: list[int] = []
    if ranks.rank == 0:
        folder.mend()
    steps = folder.steps() if ranks.rank == 0 else []
    while True:
        step = int(ranks.broadcast(str(steps.pop() if steps else 0).encode()))
        if not step:
            break
        index = _check(folder.of(step), ranks)
        if index is not None:
            load(folder.of(step), index, parts, ranks)
            return step
        damaged.append(step)
        if ranks.rank == 0:
            aside = folder.set_aside(step)
            log.warning("the checkpoint of step %d is damaged: it is %s now", step, aside)
    if damaged:
        raise UsageError(
            f"none of the checkpoints in {folder.path} is whole (steps "
            f"{', '.join(map(str, damaged))}): restore one from a copy, or remove the folder to "
            "begin at step 1 again"
        )
    return 0


def load(directory: Path, index: Index, parts: Mapping[str, CheckpointPart], ranks: Ranks) -> None:
    """Load one checkpoint.

    Raises:
        UsageError: it is of another model, or lacks a part.
        DamagedError: a file cannot be read.
    """
    with Saved(directory, index, ranks.rank, ranks.world) as saved:
        for name, part in parts.items():
            part.load(saved.part(name))


def _check(directory: Path, ranks: Ranks) -> Index | None:
    """The index, if every rank finds its share of the files whole."""
    index, bad = None, 0
    try:
        index = read_index(directory)
        check_files(directory, index, ranks.rank, ranks.world)
    except DamagedError as error:
        log.warning("%s", error)
        bad = 1
    return None if int(ranks.sum_ranks(torch.tensor([bad]))) else index
