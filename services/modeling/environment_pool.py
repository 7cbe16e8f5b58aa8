"""Runs environments beside the engine, so that a slow or hanging reward never stops decoding."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from umbra.services.modeling.environments import SampleError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call ended with: a value, or the reason why it failed."""

    key: str
    value: Any = None
    error: str = ""


@dataclass(slots=True)
class _Call:
    key: str
    what: str
    function: Callable[[], Any]
    started: float | None = None
    overdue: bool = False


class EnvironmentPool:
    """Calls in daemon threads, started as they are needed.

    A thread can't be killed: a call that takes longer than `timeout_s` fails and its thread is
    given up; another one is started in its place.

    Args:
        timeout_s: seconds a call may take, from when a thread took it up.
        threads: calls at once at most.
        wake: called, from any thread, whenever an outcome is there.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        threads: int = 64,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._threads = threads
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}
        self._alive = 0
        self._unclaimed = 0  # calls that no thread has taken up
        self._pending = 0

    @property
    def pending(self) -> int:
        """Calls whose outcome was not collected yet."""
        return self._pending

    def submit(
        self, key: str, what: str, function: Callable[[], Any], *, instant: bool = False
    ) -> None:
        """Call `function`; its outcome is collected under `key`.

        Args:
            key: the sample.
            what: what is called, in words, for errors.
            function: what to call; an awaitable that it returns is awaited.
            instant: it never blocks and takes microseconds, so it is called here and now.
        """
        self._pending += 1
        call = _Call(key, what, function)
        if instant:
            self._outcomes.put(_outcome(call))
            return
        with self._lock:
            self._unclaimed += 1
            idle = self._alive - len(self._running)
            spawn = idle < self._unclaimed and self._alive < self._threads
            self._alive += spawn
        self._calls.put(call)
        if spawn:
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def collect(self) -> list[Outcome]:
        """The outcomes since the last call, those of calls that are overdue included."""
        found: list[Outcome] = []
        while True:
            try:
                found.append(self._outcomes.get_nowait())
            except queue.Empty:
                break
        found += self._overdue()
        self._pending -= len(found)
        return found

    def close(self) -> None:
        """Let the threads end; one that hangs ends with the process."""
        with self._lock:
            alive, self._threads = self._alive, 0
        for _ in range(alive):
            self._calls.put(None)

    def _overdue(self) -> list[Outcome]:
        now = self._clock()
        outcomes: list[Outcome] = []
        spawn = 0
        with self._lock:
            for thread, call in list(self._running.items()):
                if call.started is not None and now - call.started > self._timeout_s:
                    call.overdue = True
                    del self._running[thread]
                    self._alive -= 1
                    outcomes.append(
                        Outcome(
                            call.key,
                            error=f"{call.what} took longer than environment.timeout_s = "
                            f"{self._timeout_s:g} s",
                        )
                    )
            if outcomes and self._alive < self._threads:
                spawn = min(self._unclaimed, self._threads - self._alive)
                self._alive += spawn
        for _ in range(spawn):
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return outcomes

    def _work(self) -> None:
        me = threading.get_ident()
        while (call := self._calls.get()) is not None:
            with self._lock:
                self._unclaimed -= 1
                call.started = self._clock()
                self._running[me] = call
            outcome = _outcome(call)
            with self._lock:
                if call.overdue:
                    return  # given up meanwhile, and replaced
                del self._running[me]
            self._outcomes.put(outcome)
            self._wake()


def _outcome(call: _Call) -> Outcome:
    try:
        value = call.function()
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except SampleError as error:
        return Outcome(call.key, error=str(error))
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        return Outcome(call.key, error=f"{call.what} raised {type(error).__name__}: {error}")
    return Outcome(call.key, value=value)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
