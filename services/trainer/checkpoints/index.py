"""`checkpoint.json`: what a checkpoint is of, and the files that make it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UNREADABLE, UmbraError
from umbra.services.runtime.weights.safetensors_file import checksum_of

NAME = "checkpoint.json"
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

    @property
    def world(self) -> int:
        """Ranks that wrote it."""
        return len(self.files)


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


def check_files(directory: Path, index: Index, rank: int = 0, world: int = 1) -> None:
    """Check the files of the checkpoint; of several ranks each a share.

    Raises:
        DamagedError: a file is missing, cut off or changed; names it.
    """
    for number in range(rank, index.world, world):
        path, expected = directory / file_name(number), index.files[number]
        try:
            size = path.stat().st_size
            if size != expected.size:
                raise DamagedError(f"{path} has {size} bytes instead of {expected.size}")
            if checksum_of(path).checksum != expected.checksum:
                raise DamagedError(f"{path} is damaged: its checksum is not that in {NAME}")
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
