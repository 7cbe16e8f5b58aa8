"""Devices, streams and events of the double."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from fakes.cuda_double import machine

from cupy.cuda import nccl as nccl
from cupy.cuda import runtime as runtime


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    def use(self) -> None:
        if not 0 <= self.id < runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(f"cudaErrorInvalidDevice: {self.id}")


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self._happened = threading.Event()
        self._happened.set()  # as in CUDA: one that was never recorded is done

    @property
    def done(self) -> bool:
        return self._happened.is_set()

    def record(self, stream: Stream) -> None:
        happened = self._happened = threading.Event()
        stream.enqueue(happened.set)

    def synchronize(self) -> None:
        self._happened.wait()

    def happened(self) -> threading.Event:
        return self._happened


class Stream:
    """Does its work in order, on a thread of its own."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = machine.register_stream(self.enqueue)
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self.enqueue(done.set)
        done.wait()

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.happened().wait)

    def _main(self) -> None:
        while True:
            self._work.get()()
