"""Devices, streams and events of the double."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

from fakes.cuda_double import machine

from cupy.cuda import nccl as nccl
from cupy.cuda import runtime as runtime

driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {}))


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    def use(self) -> None:
        if not 0 <= self.id < runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(101)
        machine.check()


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.happened = threading.Event()
        self.happened.set()  # as in CUDA: one that was never recorded is done

    @property
    def done(self) -> bool:
        # As CuPy: whatever is no success, an error as well, is "not yet".
        return not machine.broken and self.happened.is_set()

    def record(self, stream: Stream) -> None:
        machine.check()
        happened = self.happened = threading.Event()
        stream.enqueue(happened.set)


class Stream:
    """Does its work in order, on a thread of its own, each piece after FAKE_CUDA_DELAYS in turn."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        machine.check()
        self.ptr = len(machine.streams)
        machine.streams.append(self)
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        machine.check()
        done = threading.Event()
        self.enqueue(done.set)
        done.wait()

    def wait_event(self, event: Event) -> None:
        machine.check()
        self.enqueue(event.happened.wait)

    @property
    def idle(self) -> bool:
        return self._work.empty()

    def _main(self) -> None:
        while True:
            work = self._work.get()
            delays = os.environ.get("FAKE_CUDA_DELAYS", "0").split(",")
            time.sleep(float(delays[self.ptr % len(delays)]))
            work()
