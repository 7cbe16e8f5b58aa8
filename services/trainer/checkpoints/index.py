"""`checkpoint.json`: what a checkpoint is of, and the files that make it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UNREADABLE, UmbraError
from umbra.services.weights.safetensors_file import checksum_of

NAME = "checkpoint.json"
NODE = "node-"  # begins the names of the folders of other nodes than the first
FORMAT = 2  # in 1 files did not tell the first of their rows


class DamagedError(UmbraError):
    """A checkpoint that is not whole."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A whole tensor: all its rows, over all ranks."""

    shape: list[int]
    dtype: str  # safetensors' name


class FileInfo(msgspec.Struct, frozen=True):
    """One rank's file."""

    size: int
    checksum: int  # XXH3


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file, which is written last."""

    format: int = FORMAT
    step: int
    run: str
    saved_at: float  # seconds since the epoch
    config: dict[str, Any]  # of the run, resolved
    metrics: dict[str, float]  # of the step
    tensors: dict[str, TensorInfo]  # by "part/name"
    files: list[FileInfo]  # by rank
    holders: int = 0  # the first so many ranks have all rows; 0 = all ranks
    hosts: list[str] = []  # by node, each with equally many ranks; none = one host

    @property
    def world(self) -> int:
        """Ranks that wrote it."""
        return len(self.files)

    @property
    def with_rows(self) -> range:
        """The files that rows are in; the others have what is a rank's own, which can be missed."""
        return range(self.holders or self.world)

    def describe(self, number: int) -> str:
        """The name of a file, and the host that wrote it."""
        if len(self.hosts) < 2:
            return file_name(number)
        node = number * len(self.hosts) // self.world
        return f"{file_name(number)} of node {node} ({self.hosts[node]})"


def file_name(rank: int) -> str:
    """The file of `rank`."""
    return f"rank-{rank:05d}.safetensors"


def read_index(directory: Path) -> Index:
    """The index of the checkpoint in `directory`.

    Raises:
        DamagedError: there is none, or it cannot be read; says why.
    """
    path = directory / NAME
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    if index.format not in (1, FORMAT):
        raise DamagedError(f"{path} has format {index.format}, this Umbra reads {FORMAT}")
    return index


def find_files(directory: Path, index: Index) -> dict[int, Path]:
    """The files of the checkpoint in `directory` that are on this host, by rank.

    They may be in the folders of several nodes, if hosts share a disk, or these were copied.
    """
    root = directory.parent
    if root.name.startswith(NODE):
        root = root.parent
    places = [directory, root / directory.name, *sorted(root.glob(f"{NODE}*/{directory.name}"))]
    found: dict[int, Path] = {}
    for number, file in enumerate(index.files):
        for place in places:
            path = place / file_name(number)
            if path.is_file() and (number not in found or path.stat().st_size == file.size):
                found[number] = path
                if path.stat().st_size == file.size:
                    break
    return found


def check_file(path: Path, expected: FileInfo) -> None:
    """Check a file of a checkpoint.

    Raises:
        DamagedError: it is missing, cut off or changed; names it.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise DamagedError(f"{path} has {size} bytes instead of {expected.size}")
        if checksum_of(path).checksum != expected.checksum:
            raise DamagedError(f"{path} is damaged: its checksum is not that in {NAME}")
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error


def check_files(directory: Path, index: Index) -> dict[int, Path]:
    """The files of the checkpoint by rank, if all that have rows are on this host and whole.

    Raises:
        DamagedError: a file is missing, cut off or changed; names it.
    """
    found = find_files(directory, index)
    for number in index.with_rows:
        if number not in found:
            raise DamagedError(f"{directory} has no {index.describe(number)}")
    for number, path in found.items():
        check_file(path, index.files[number])
    return found
