"""Base of the double of CuPy: its files, faults and streams, and the errors of CUDA.

It is not within the package, since pyright takes that for the real one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXTS = {
    2: "cudaErrorMemoryAllocation: out of memory",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    712: "cudaErrorHostMemoryAlreadyRegistered: part or all of it is already mapped",
}

broken = 0  # an error that stays, as after an access to memory that is not ours
streams: list[Any] = []  # by what CuPy calls the pointer of a stream
_maps: dict[int, mmap.mmap] = {}
names: dict[int, str] = {}  # of the file behind each address


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(TEXTS[status])


def check() -> None:
    """After an error that stays every call fails."""
    if broken:
        raise CUDARuntimeError(broken)


def folder() -> Path:
    return Path(os.environ["FAKE_CUDA_DIR"])


def name() -> str:
    """Of this process, for faults."""
    return os.environ.get("FAKE_CUDA_NAME", "")


def setting(variable: str, default: int) -> int:
    return int(os.environ.get(variable, str(default)))


def note(file: str, line: str) -> None:
    with (folder() / file).open("a") as log:
        log.write(f"{name()} {line}\n")


def strikes(what: str) -> bool:
    """Return whether there is a file WHAT-NAME for this process; it is used up."""
    file = folder() / f"{what}-{name()}"
    if not file.exists():
        return False
    file.unlink()
    (folder() / f"{what}-reached-{name()}").touch()
    return True


def enqueue(stream: int, work: Callable[[], object]) -> None:
    streams[stream].enqueue(work)


def map_file(file: str) -> int:
    """The address of a file's bytes; mapped for good, since streams may have work in it."""
    with (folder() / file).open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _maps[address], names[address] = mapped, file
    return address
