"""Base of the double of CuPy: folder, name, streams and mapped files of this process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_maps: dict[int, mmap.mmap] = {}
broken = 0  # an error that stays, as after an access to memory that is not ours
_streams: list[Stream] = []
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


class Stream(Protocol):
    """A stream of the double."""

    @property
    def idle(self) -> bool: ...
    def enqueue(self, work: Callable[[], object]) -> None: ...


def register_stream(stream: Stream) -> int:
    """Return the value that CuPy calls the pointer of a stream."""
    _streams.append(stream)
    return len(_streams) - 1


def enqueue(stream: int, work: Callable[[], object]) -> None:
    """Do something in a stream."""
    _streams[stream].enqueue(work)


def delay_s(stream: int) -> float:
    """Seconds before each piece of work of a stream, by its number: FAKE_CUDA_DELAYS, in turn."""
    delays = os.environ.get("FAKE_CUDA_DELAYS", "0").split(",")
    return float(delays[stream % len(delays)])


def idle(stream: int) -> bool:
    """Return whether nothing waits in a stream."""
    return _streams[stream].idle


def check(error: Callable[[int], Exception]) -> None:
    """After an error that stays every call fails."""
    if broken:
        raise error(broken)


def map_file(file: str) -> int:
    """The address of a file's bytes; mapped for good, since streams may have work in it."""
    with (folder() / file).open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _maps[address], names[address] = mapped, file
    return address


def strikes(what: str) -> bool:
    """Return whether there is a file WHAT-NAME for this process; it is used up."""
    file = folder() / f"{what}-{name()}"
    if not file.exists():
        return False
    file.unlink()
    (folder() / f"{what}-reached-{name()}").touch()
    return True
