"""Copies between host memory and a GPU: page-locked, and waited for together."""

from __future__ import annotations

import ctypes
import logging
import time
from contextlib import suppress
from typing import Any

import torch

from umbra.services.weights.memory import Mapping

UNFINISHED_BYTES = 64 << 20  # of copies that were begun, before they are waited for
HOST_REGISTER_PORTABLE = 1  # for all GPUs of the process

log = logging.getLogger(__name__)


def page_lock(memory: object) -> None:
    """Register the mapping that `memory` is a view of with CUDA, once, until it is unmapped.

    CUDA copies to and from other host memory through a buffer of its own, at a third to an eighth
    of the speed. So it does with memory that it refuses, which is logged once, and with memory
    that is no `Mapping`.
    """
    mapping = memory.obj if isinstance(memory, memoryview) else None
    if not isinstance(mapping, Mapping) or mapping.unmapping is not None:
        return
    cudart: Any = torch.cuda.cudart()
    locked: list[int] = []

    def unlock() -> None:
        for address in locked:
            cudart.cudaHostUnregister(address)

    mapping.unmapping = unlock
    began = time.perf_counter()
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
    log.debug("page-locked %d bytes in %.2f s", len(mapping), time.perf_counter() - began)


class GpuCopies:
    """Copies that a GPU may not have finished: the memory at both ends is still in use."""

    def __init__(self) -> None:
        self._begun = 0
        self._device: torch.device | None = None

    def made(self, on: torch.Tensor, nbytes: int) -> bool:
        """Note a copy to or from `on`; return whether all of them are finished."""
        if on.is_cuda:
            self._begun += nbytes
            self._device = on.device
        if self._begun >= UNFINISHED_BYTES:
            self.finish()
        return self._begun == 0

    def finish(self) -> None:
        """Wait until all copies are finished."""
        if self._begun:
            torch.cuda.current_stream(self._device).synchronize()
            self._begun = 0
