"""Going on from the newest checkpoint that is whole; all ranks do this together.

Each host has the files of its ranks, in a folder of its own or on a shared disk. A checkpoint is
whole if each file that rows are in is whole on some host.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    DamagedError,
    Index,
    check_file,
    find_files,
    read_index,
)
from umbra.services.trainer.checkpoints.parts import CheckpointPart
from umbra.services.trainer.checkpoints.reading import Saved
from umbra.services.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)

SHOWN = 4  # faults in an error


class _Seen(msgspec.Struct, frozen=True):
    """A checkpoint of which a host has a folder."""

    step: int
    saved_at: float = 0.0  # tells apart two of one step; 0 if the index cannot be read
    error: str = ""


class _File(msgspec.Struct, frozen=True):
    """What a rank finds of a file; the identity is that of the very same one on a shared disk."""

    number: int
    identity: tuple[int, int, int]
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Whole:
    """A checkpoint that can be loaded."""

    directory: Path
    index: Index
    paths: dict[int, Path]
    seen: list[set[int]]  # by node; none if all have all


def resume(folder: CheckpointFolder, parts: Mapping[str, CheckpointPart], ranks: Ranks) -> int:
    """Load the newest whole checkpoint into `parts`; its step, or 0 where there is none.

    Those after it are named and set aside. Any number of ranks and hosts may have written it.

    Raises:
        UsageError: there are checkpoints, but none is whole; or it is of another model.
    """
    faults: dict[int, str] = {}
    leads = ranks.rank == ranks.hosts.place.ranks_on(ranks.node)[0]
    if leads:
        folder.mend()
    for found in _candidates(folder, ranks, leads=leads):
        whole = found.error or _check(folder, found, ranks)
        if isinstance(whole, str):
            faults.setdefault(found.step, whole)
            if ranks.rank == 0:
                log.warning("the checkpoint of step %d is damaged: %s", found.step, whole)
            continue
        for step in faults if leads else ():
            if step > found.step and step in folder.steps():
                aside = folder.set_aside(step)
                log.warning("the checkpoint of step %d is %s now", step, aside)
        with Saved(whole.directory, whole.index, whole.paths, ranks, whole.seen) as saved:
            for name, part in parts.items():
                part.load(saved.part(name))
        return found.step
    if faults:
        newest = max(faults)
        raise UsageError(
            f"none of the checkpoints in {folder.root} is whole (steps "
            f"{', '.join(map(str, sorted(faults)))}); of step {newest}: {faults[newest]}: restore "
            "one from a copy, or remove the folder, on all hosts, to begin at step 1 again"
        )
    return 0


def _candidates(folder: CheckpointFolder, ranks: Ranks, *, leads: bool) -> list[_Seen]:
    """The checkpoints of which any host has files, the newest first."""
    mine: set[tuple[int, float, str]] = set()
    for step, path in folder.seen() if leads else ():
        try:
            mine.add((step, read_index(path).saved_at, ""))
        except DamagedError as error:
            mine.add((step, 0.0, str(error)))
    content = msgspec.json.encode([_Seen(*one) for one in sorted(mine)])
    found = {
        (one.step, one.saved_at, one.error): one
        for some in ranks.collect(content)
        for one in msgspec.json.decode(some, type=list[_Seen])
    }
    return [found[key] for key in sorted(found, reverse=True)]


def _check(folder: CheckpointFolder, found: _Seen, ranks: Ranks) -> _Whole | str:
    """The checkpoint if it is whole, else what is wrong with it."""
    place = ranks.hosts.place
    directory, index = _own(folder, found)
    has = [bool(flag) for flag in ranks.collect(b"x" if index is not None else b"")]
    content = b"" if index is None else msgspec.json.encode(index)
    content = ranks.spread(content, has.index(True))
    index = index or msgspec.json.decode(content, type=Index)
    paths = find_files(directory, index)
    # Each file once: what is on a disk that hosts share, by the first of them.
    there = _gather(ranks, [_File(n, _identity(path)) for n, path in paths.items()])
    mine: list[_File] = []
    for number, path in paths.items():
        same = [n for n in range(place.nodes) if there[n].get(number) == there[ranks.node][number]]
        if (
            same[0] == ranks.node
            and ranks.rank == place.ranks_on(ranks.node)[number % place.per_host]
        ):
            mine.append(_File(number, _identity(path), _fault(path, index, number)))
    checked = _gather(ranks, mine)
    seen: list[set[int]] = []
    faults = {n: f"there is no {index.describe(n)} in {directory}" for n in index.with_rows}
    for those in there:
        good: set[int] = set()
        for number, file in those.items():
            verdict = next(c[number] for c in checked if _is_of(c.get(number), file))
            if not verdict.error:
                good.add(number)
                faults.pop(number, None)
            elif number in faults:
                faults[number] = verdict.error
        seen.append(good)
    if faults:
        shown = list(faults.values())
        more = f", and {len(shown) - SHOWN} more files" if len(shown) > SHOWN else ""
        return "; ".join(shown[:SHOWN]) + more
    paths = {number: path for number, path in paths.items() if number in seen[ranks.node]}
    everywhere = all(those == set(range(index.world)) for those in seen)
    return _Whole(directory, index, paths, [] if everywhere else seen)


def _own(folder: CheckpointFolder, found: _Seen) -> tuple[Path, Index | None]:
    """This host's folder of a checkpoint, and its index, if there is one."""
    for step, path in folder.seen():
        if step == found.step:
            with suppress(DamagedError):
                index = read_index(path)
                if index.saved_at == found.saved_at:
                    return path, index
    return folder.of(found.step), None


def _gather(ranks: Ranks, mine: list[_File]) -> list[dict[int, _File]]:
    """What the ranks of each host say, by node and number."""
    place = ranks.hosts.place
    found: list[dict[int, _File]] = [{} for _ in range(place.nodes)]
    for rank, content in enumerate(ranks.collect(msgspec.json.encode(mine))):
        for file in msgspec.json.decode(content, type=list[_File]):
            found[place.node(rank)][file.number] = file
    return found


def _is_of(verdict: _File | None, file: _File) -> bool:
    return verdict is not None and verdict.identity == file.identity


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        known = path.stat()
    except OSError:
        return (0, 0, 0)
    return known.st_ino, known.st_mtime_ns, known.st_size


def _fault(path: Path, index: Index, number: int) -> str:
    try:
        check_file(path, index.files[number])
    except DamagedError as error:
        return str(error)
    return ""
