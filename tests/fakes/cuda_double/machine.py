"""What the double of CuPy stands on: folder, name, streams and mapped files of this process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

_maps: dict[int, mmap.mmap] = {}
_streams: list[Callable[[Callable[[], object]], None]] = []
names: dict[int, str] = {}  # of the file behind each address


def folder() -> Path:
    """Where this machine's files are."""
    return Path(os.environ["FAKE_CUDA_DIR"])


def name() -> str:
    """Of this process, for faults."""
    return os.environ.get("FAKE_CUDA_NAME", "")


def setting(variable: str, default: int) -> int:
    """A number from the environment."""
    return int(os.environ.get(variable, str(default)))


def register_stream(enqueue: Callable[[Callable[[], object]], None]) -> int:
    """What CuPy calls the pointer of a stream."""
    _streams.append(enqueue)
    return len(_streams) - 1


def enqueue(stream: int, work: Callable[[], object]) -> None:
    """Do something in a stream."""
    _streams[stream](work)


def map_file(file: str) -> int:
    """The address of a file's bytes; mapped for good, since streams may have work in it."""
    with (folder() / file).open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _maps[address], names[address] = mapped, file
    return address


def strikes(what: str) -> bool:
    """Whether there is a file WHAT-NAME for this process; it is used up."""
    file = folder() / f"{what}-{name()}"
    if not file.exists():
        return False
    file.unlink()
    (folder() / f"{what}-reached-{name()}").touch()
    return True
