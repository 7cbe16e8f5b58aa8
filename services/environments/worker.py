"""A process that runs a user's environments: `python -m umbra.services.environments.worker`.

The pool that started it asks over a pipe. What the user's code prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.environments.environment_host import EnvironmentHost
from umbra.services.environments.loading import load_environment, name_of
from umbra.services.environments.protocol import (
    EnvironmentFactory,
    Opening,
    SampleError,
    StepResult,
)
from umbra.services.environments.response import Said
from umbra.services.runtime.config import EnvironmentConfig
from umbra.services.runtime.process.parent import die_with_parent
from umbra.services.runtime.process.pipe import AsyncPipe, parents_end

ASYNC_ROOM = 64  # plays at once, of an environment whose `step` is a coroutine


class Setup(msgspec.Struct, tag="setup"):
    """First to a worker: which environment."""

    config: EnvironmentConfig


class Hello(msgspec.Struct, tag="hello"):
    """First from a worker: how many plays it takes at once, or why it can't work."""

    room: int = 1
    usage_error: str = ""


class Play(msgspec.Struct, tag="play"):
    """To a worker: the last of `responses` is new."""

    number: int
    key: str
    row: dict[str, Any]
    responses: list[Said | str]


class Forget(msgspec.Struct, tag="forget"):
    """To a worker: the sample is over."""

    key: str


class Played(msgspec.Struct, tag="played"):
    """From a worker: answers, or why there are none. `exhausted`: memory ran out, it leaves."""

    number: int
    results: list[Opening | StepResult] = msgspec.field(default_factory=list)
    error: str = ""
    exhausted: bool = False


ToWorker = Setup | Play | Forget
FromWorker = Hello | Played


class Worker:
    """Answers plays until its input ends."""

    def __init__(self, plays: EnvironmentHost, timeout_s: float, pool: AsyncPipe[ToWorker]) -> None:
        self._plays = plays
        self._timeout_s = timeout_s
        self._pool = pool
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
            self._pool.send(Played(play.number, results))
        except SampleError as error:
            exhausted = isinstance(error.__cause__, MemoryError)
            self._pool.send(Played(play.number, error=str(error), exhausted=exhausted))
        except TimeoutError:
            self._plays.forget(play.key)
            self._pool.send(Played(play.number, error=overdue(self._timeout_s)))
        except (TypeError, ValueError, OverflowError) as error:
            self._pool.send(Played(play.number, error=f"the environment's answer: {error}"))

    def _over(self, play: Play, task: asyncio.Task[None]) -> None:
        if self._under_way.get(play.key) is task:
            del self._under_way[play.key]
        if task.cancelled():
            self._pool.send(Played(play.number, error="its sample is over"))
        elif (error := task.exception()) is not None:
            self._pool.send(Played(play.number, error=f"the environment: {error!r}"))


def overdue(timeout_s: float) -> str:
    """What a sample fails with whose environment took too long."""
    return f"the environment took longer than environment.timeout_s = {timeout_s:g} s"


def room_of(make: EnvironmentFactory) -> int:
    """How many plays one process takes at once: methods that block take it one by one."""
    environment = make()
    waits = inspect.iscoroutinefunction(environment.step)
    return ASYNC_ROOM if waits or getattr(environment, "concurrent", False) else 1


async def _serve() -> None:
    pool: AsyncPipe[ToWorker] = AsyncPipe(parents_end(), ToWorker)
    setup = await pool.receive()
    if not isinstance(setup, Setup):
        return
    config = setup.config
    try:
        make = load_environment(config)
        hello = Hello(room=room_of(make))
    except UmbraError as error:
        pool.send(Hello(usage_error=str(error)))
        return
    if config.memory_mb:
        limit = config.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pool.send(hello)
    worker = Worker(EnvironmentHost(make, name_of(config)), config.timeout_s, pool)
    while isinstance(message := await pool.receive(), Play | Forget):
        worker.take(message)


def main() -> None:
    """Serve the process that started this one."""
    # Ctrl-C is for the parent: it ends this process, after it has handed its samples back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)  # whatever the user's code is in
    asyncio.run(_serve())
    os._exit(0)  # a thread of the user's must not hold the process


if __name__ == "__main__":
    main()
