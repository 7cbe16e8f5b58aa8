"""An asyncio event loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from umbra.proto.errors import ends_process, service_thread

CLOSE_S = 5.0  # for what runs in the thread when it is closed

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._name = name
        self._thread = service_thread(self._run, name)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def call(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `function` there, soon; never, if it is closed. What it raises ends the process."""
        if not self.closed:
            guarded = ends_process(function, f"the thread {self._name}")
            self._loop.call_soon_threadsafe(guarded, *args)

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `coroutine` there and return its result; TimeoutError if it takes longer."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the thread; one whose loop is held up ends with the process."""
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


def ends_with_it(task: asyncio.Task[None]) -> None:
    """End the process if `task`, which is done and whose result nobody takes, has failed."""
    if not task.cancelled():
        ends_process(task.result, task.get_name())()
