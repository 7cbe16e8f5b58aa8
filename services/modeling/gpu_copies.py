"""Copies of weights: past the cache in host memory, page-locked to and from a GPU."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch

from umbra.services.weights.memory import Mapping

MARK_BYTES = 16 << 20  # of copies between two events of their stream
HOST_REGISTER_PORTABLE = 1  # for all GPUs of the process

log = logging.getLogger(__name__)


def page_lock(memory: object) -> None:
    """Register the mapping that `memory` is a view of with CUDA, once, until it is unmapped.

    CUDA copies to and from other host memory through a buffer of its own, at a third to an eighth
    of the speed. Memory that it refuses, which is logged once, or that is no `Mapping` stays so.
    """
    mapping = memory.obj if isinstance(memory, memoryview) else None
    if not isinstance(mapping, Mapping) or mapping.unmapping is not None:
        return
    cudart: Any = torch.cuda.cudart()
    device = torch.cuda.device(torch.cuda.current_device())
    locked: list[int] = []

    def unlock() -> None:
        with device:  # the thread that unmaps may be another, which would make a context on GPU 0
            for address in locked:
                cudart.cudaHostUnregister(address)

    mapping.unmapping = unlock
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for start, end in mapping.ranges or [(0, len(mapping))]:
        code = int(cudart.cudaHostRegister(base + start, end - start, HOST_REGISTER_PORTABLE))
        if code:
            with suppress(Exception):  # CUDA raises it at the next kernel, whoever starts it
                torch.zeros(1, device="cuda")
            log.warning(
                "CUDA does not page-lock %d bytes of host memory (error %d): copies of weights "
                "between it and the GPU are slower",
                *(end - start, code),
            )
            return
        locked.append(base + start)


@contextmanager
def gpu_copies(
    tensors: Iterable[torch.Tensor], finished: Callable[[int], object] | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Copy to or from all of `tensors` that are on a GPU, on a stream of its own.

    A copy begun within the block sees all that the current stream has begun before, and is done
    when the block ends, also by an error. The block gets a function to call after each copy of so
    many bytes, with the byte of the version where it ends; `finished` is called with such an end
    when all before it is in place.
    """
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    stream = None if device is None else _copy_stream(device)
    marks: deque[tuple[torch.cuda.Event, int]] = deque()
    unmarked = 0

    def begun(nbytes: int, end: int) -> None:
        nonlocal unmarked
        unmarked += nbytes
        if stream is not None and unmarked >= MARK_BYTES:
            mark = torch.cuda.Event(blocking=True)  # the cores are for checksums
            mark.record(stream)
            marks.append((mark, end))
            unmarked = 0
            tell(wait=False)

    def tell(*, wait: bool) -> None:
        while marks and (wait or marks[0][0].query()):
            mark, end = marks.popleft()
            mark.synchronize()
            if finished is not None:
                finished(end)

    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield begun
        tell(wait=True)
    finally:
        if stream is not None:
            stream.synchronize()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of `device` for copies: torch keeps freed memory by stream."""
    return torch.cuda.Stream(device)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def fill(place: torch.Tensor, piece: torch.Tensor) -> None:
    """Copy `piece` to `place`, which has its shape; a copy to a GPU is only begun.

    With one thread the C library does it, which writes past the cache (`with_fast_copies`): twice
    as fast as torch's own loop. With several threads torch divides the copy among them.
    """
    plain = type(place) is torch.Tensor and place.dtype == piece.dtype
    plain = plain and place.is_contiguous() and piece.is_contiguous()
    if plain and place.is_cpu and piece.is_cpu and torch.get_num_threads() == 1:
        ctypes.memmove(place.data_ptr(), piece.data_ptr(), piece.nbytes)
    else:
        place.copy_(piece, non_blocking=True)
