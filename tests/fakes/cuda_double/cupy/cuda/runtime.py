"""Memory of the double: each allocation is a file that other processes can map."""

from __future__ import annotations

import ctypes
import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

memcpyHostToDevice = 1  # noqa: N816 - CUDA's names
memcpyDeviceToHost = 2  # noqa: N816
memcpyDeviceToDevice = 3  # noqa: N816
HANDLE_BYTES = 64

_maps: dict[int, mmap.mmap] = {}
_names: dict[int, str] = {}
_streams: list[Callable[[Callable[[], object]], None]] = []
_pinned: set[int] = set()


class CUDARuntimeError(RuntimeError):
    status = 2


def folder() -> Path:
    return Path(os.environ["FAKE_CUDA_DIR"])


def name() -> str:
    return os.environ.get("FAKE_CUDA_NAME", "")


def getDeviceCount() -> int:  # noqa: N802
    return int(os.environ.get("FAKE_CUDA_DEVICES", "2"))


def check_device(index: int) -> None:
    if not 0 <= index < getDeviceCount():
        raise CUDARuntimeError(f"cudaErrorInvalidDevice: {index}")


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    check_device(device)
    return {"uuid": bytes([device]) * 16}


def runtimeGetVersion() -> int:  # noqa: N802
    return int(os.environ.get("FAKE_CUDA_VERSION", "13000"))


def register_stream(enqueue: Callable[[Callable[[], object]], None]) -> int:
    _streams.append(enqueue)
    return len(_streams) - 1


def enqueue(stream: int, work: Callable[[], object]) -> None:
    _streams[stream](work)


def malloc(size: int) -> int:
    limit = int(os.environ.get("FAKE_CUDA_MEMORY", str(1 << 40)))
    if size > limit:
        raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
    file = f"memory-{uuid.uuid4().hex[:16]}"
    with (folder() / file).open("w+b") as opened:
        opened.truncate(size)
    return _map(file)


def free(ptr: int) -> None:
    _names.pop(ptr)  # the mapping stays: streams may have work in it still


def hostRegister(ptr: int, size: int, flags: int) -> None:  # noqa: N802
    if ptr in _pinned:
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
    _pinned.add(ptr)


def hostUnregister(ptr: int) -> None:  # noqa: N802
    _pinned.remove(ptr)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    enqueue(stream, lambda: ctypes.memmove(dst, src, size))


def ipcGetMemHandle(ptr: int) -> bytes:  # noqa: N802
    return _names[ptr].encode().ljust(HANDLE_BYTES, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:  # noqa: N802
    assert len(handle) == HANDLE_BYTES
    file = handle.rstrip(b"\0").decode()
    with (folder() / "ipc-opened").open("a") as log:
        log.write(f"{name()} {file}\n")
    try:
        return _map(file)
    except OSError as error:
        raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: {file}") from error


def ipcCloseMemHandle(ptr: int) -> None:  # noqa: N802
    _names.pop(ptr)


def _map(file: str) -> int:
    with (folder() / file).open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _maps[address], _names[address] = mapped, file
    return address
