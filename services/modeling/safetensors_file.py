"""Writing the safetensors format without torch, piece by piece.

Eight bytes with the length of a JSON header, that header, then the tensors one after the other,
little-endian and row-major. Pieces are small enough that a thread which writes holds up no other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from umbra.services.process.files import DISK, Disk

HEADER_ALIGN = 8
PIECE_BYTES = 8 << 20


class Stored(NamedTuple):
    """A tensor as its file has it."""

    name: str
    dtype: str  # safetensors' name: F32, BF16, I64, ...
    shape: Iterable[int]
    data: memoryview  # contiguous, of bytes


class Written(NamedTuple):
    """A whole file: its size and its XXH3 checksum."""

    size: int
    checksum: int


def write_safetensors(
    path: Path,
    tensors: Iterable[Stored],
    metadata: Mapping[str, str],
    *,
    sync: bool = False,
    mode: int = 0o666,
    disk: Disk = DISK,
) -> Written:
    """Write `tensors` as the new file `path`; with `sync`, return only when the disk has it.

    `mode` are the permissions of the file, less what the process's umask takes away.

    Raises:
        OSError: the file is there already, or cannot be written.
    """
    stored = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in stored:
        end = position + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGN)
    size, checksum = 0, xxhash.xxh3_64()
    with disk.opened(path, new=True, mode=mode) as fd:
        for data in (
            memoryview(struct.pack("<Q", len(encoded)) + encoded),
            *(tensor.data for tensor in stored),
        ):
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                disk.write_all(fd, piece, size + start)
                checksum.update(piece)
            size += data.nbytes
        if sync:
            disk.sync(fd)
    return Written(size, checksum.intdigest())


def checksum_of(path: Path) -> Written:
    """Size and checksum of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    size, checksum = 0, xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            checksum.update(piece)
            size += len(piece)
    return Written(size, checksum.intdigest())
