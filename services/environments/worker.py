"""A process that runs a user's environments: `python -m umbra.services.environments.worker`.

It reads requests from stdin and answers on stdout. What the user's code prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import sys
from typing import BinaryIO

from umbra.proto.errors import UmbraError
from umbra.services.environments.environment_host import EnvironmentHost
from umbra.services.environments.loading import load_environment, name_of
from umbra.services.environments.protocol import EnvironmentFactory, SampleError
from umbra.services.environments.worker_frames import (
    Forget,
    Hello,
    Play,
    Played,
    Setup,
    frame,
    read_by_worker,
)
from umbra.services.runtime.config import EnvironmentConfig

ASYNC_ROOM = 64  # plays at once, of an environment whose `step` is a coroutine
_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers plays until its input ends."""

    def __init__(self, plays: EnvironmentHost, timeout_s: float, out: BinaryIO) -> None:
        self._plays = plays
        self._timeout_s = timeout_s
        self._out = out
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by sample

    def take(self, message: Play | Forget) -> None:
        """Begin what is asked for."""
        if isinstance(message, Forget):
            self._plays.forget(message.key)
            if (task := self._under_way.get(message.key)) is not None:
                task.cancel()
            return
        task = asyncio.ensure_future(self._play(message))
        self._under_way[message.key] = task
        task.add_done_callback(lambda _: self._over(message, task))

    async def _play(self, play: Play) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await self._plays.play(play.key, play.row, play.responses)
            reply = frame(Played(play.number, results))
        except SampleError as error:
            exhausted = isinstance(error.__cause__, MemoryError)
            reply = frame(Played(play.number, error=str(error), exhausted=exhausted))
        except TimeoutError:
            self._plays.forget(play.key)
            reply = frame(Played(play.number, error=overdue(self._timeout_s)))
        except (TypeError, ValueError, OverflowError) as error:
            reply = frame(Played(play.number, error=f"the environment's answer: {error}"))
        self._write(reply)

    def _over(self, play: Play, task: asyncio.Task[None]) -> None:
        if self._under_way.get(play.key) is task:
            del self._under_way[play.key]
        if task.cancelled():
            self._write(frame(Played(play.number, error="its sample is over")))
        elif (error := task.exception()) is not None:
            self._write(frame(Played(play.number, error=f"the environment: {error!r}")))

    def _write(self, reply: bytes) -> None:
        self._out.write(reply)
        self._out.flush()


def overdue(timeout_s: float) -> str:
    """What a sample fails with whose environment took too long."""
    return f"the environment took longer than environment.timeout_s = {timeout_s:g} s"


def room_of(make: EnvironmentFactory) -> int:
    """How many plays one process takes at once: methods that block take it one by one."""
    environment = make()
    waits = inspect.iscoroutinefunction(environment.step)
    return ASYNC_ROOM if waits or getattr(environment, "concurrent", False) else 1


def _confine(config: EnvironmentConfig) -> None:
    """End with the parent, and keep within the memory limit."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if config.memory_mb:
        limit = config.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def _serve(source: int, out: BinaryIO) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb")
    )
    setup = await read_by_worker(reader)
    if not isinstance(setup, Setup):
        return
    config = setup.config
    try:
        make = load_environment(config)
        hello = Hello(room=room_of(make))
    except UmbraError as error:
        out.write(frame(Hello(usage_error=str(error))))
        out.flush()
        return
    _confine(config)
    out.write(frame(hello))
    out.flush()
    worker = Worker(EnvironmentHost(make, name_of(config)), config.timeout_s, out)
    while isinstance(message := await read_by_worker(reader), Play | Forget):
        worker.take(message)


def main() -> None:
    """Serve the process that started this one."""
    # Ctrl-C is for the parent: it ends this process, after it has handed its samples back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, out = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    asyncio.run(_serve(source, out))
    os._exit(0)  # a thread of the user's must not hold the process


if __name__ == "__main__":
    sys.exit(main())
