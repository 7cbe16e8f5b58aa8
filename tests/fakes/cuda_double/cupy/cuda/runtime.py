"""Memory of the double: each allocation is a file that other processes can map."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from fakes.cuda_double import machine
from fakes.cuda_double.machine import CUDARuntimeError as CUDARuntimeError
from fakes.cuda_double.machine import check

memcpyHostToDevice = 1  # noqa: N816 - CUDA's names
memcpyDeviceToHost = 2  # noqa: N816
memcpyDeviceToDevice = 3  # noqa: N816
HANDLE_BYTES = 64

_pinned: set[int] = set()


def streamQuery(stream: int) -> int:  # noqa: N802
    return machine.broken or (0 if machine.streams[stream].idle else 600)


def getDeviceCount() -> int:  # noqa: N802
    return machine.setting("FAKE_CUDA_DEVICES", 2)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {"uuid": b""}  # as CuPy has it of a UUID that begins with a zero byte


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    return f"0000:{device:02X}:00.0"


def runtimeGetVersion() -> int:  # noqa: N802
    return 13000


def deviceGetAttribute(attribute: int, device: int) -> int:  # noqa: N802
    return machine.setting("FAKE_CUDA_COMPUTE_MODE", 0) if attribute == 20 else 0


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    check()
    room = machine.setting("FAKE_CUDA_TOTAL", 1 << 40)
    return min(room, machine.setting("FAKE_CUDA_MEMORY", room)), room


def malloc(size: int) -> int:
    check()
    if size > machine.setting("FAKE_CUDA_MEMORY", 1 << 40):
        raise CUDARuntimeError(2)
    file = f"memory-{uuid.uuid4().hex[:16]}"
    with (machine.folder() / file).open("w+b") as opened:
        opened.truncate(size)
    return machine.map_file(file)


def free(ptr: int) -> None:
    check()
    machine.names.pop(ptr)


def hostRegister(ptr: int, size: int, flags: int) -> None:  # noqa: N802
    check()
    if ptr in _pinned:
        raise CUDARuntimeError(712)
    _pinned.add(ptr)


def hostUnregister(ptr: int) -> None:  # noqa: N802
    check()
    _pinned.remove(ptr)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    check()
    if machine.strikes("break-copy"):
        machine.broken = 700  # as an error of asynchronous work: later calls tell
        return
    machine.enqueue(stream, lambda: ctypes.memmove(dst, src, size))


def ipcGetMemHandle(ptr: int) -> bytes:  # noqa: N802
    check()
    return machine.names[ptr].encode().ljust(HANDLE_BYTES, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:  # noqa: N802
    check()
    assert len(handle) == HANDLE_BYTES
    file = handle.rstrip(b"\0").decode()
    machine.note("ipc-opened", file)
    try:
        if machine.setting("FAKE_CUDA_IPC", 1) == 0:
            raise OSError("another container")
        return machine.map_file(file)
    except OSError as error:
        raise CUDARuntimeError(400) from error


def ipcCloseMemHandle(ptr: int) -> None:  # noqa: N802
    free(ptr)
