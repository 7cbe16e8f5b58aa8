"""Devices, streams and events of the double."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from fakes.cuda_double import machine

from cupy.cuda import driver as driver
from cupy.cuda import nccl as nccl
from cupy.cuda import runtime as runtime


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    def use(self) -> None:
        if not 0 <= self.id < runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(101)
        machine.check(runtime.CUDARuntimeError)


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self._happened = threading.Event()
        self._happened.set()  # as in CUDA: one that was never recorded is done

    @property
    def done(self) -> bool:
        # As CuPy: whatever is no success, an error as well, is "not yet".
        return not machine.broken and self._happened.is_set()

    def record(self, stream: Stream) -> None:
        machine.check(runtime.CUDARuntimeError)
        happened = self._happened = threading.Event()
        stream.enqueue(happened.set)

    def synchronize(self) -> None:
        self._happened.wait()

    def happened(self) -> threading.Event:
        return self._happened


class Stream:
    """Does its work in order, on a thread of its own."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        machine.check(runtime.CUDARuntimeError)
        self.ptr = machine.register_stream(self)
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        machine.check(runtime.CUDARuntimeError)
        done = threading.Event()
        self.enqueue(done.set)
        done.wait()

    def wait_event(self, event: Event) -> None:
        machine.check(runtime.CUDARuntimeError)
        self.enqueue(event.happened().wait)

    @property
    def idle(self) -> bool:
        return self._work.empty()

    def _main(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(machine.delay_s(self.ptr))
            work()
