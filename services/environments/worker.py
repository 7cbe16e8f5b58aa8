"""A process that runs a user's environments, in a Python environment of its own if need be.

The pool that started it asks over a pipe (`worker_pool.py`). What the user's code prints goes
to stderr.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import os
import resource
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack

from umbra.proto.errors import UmbraError
from umbra.services.environments.environment_host import EnvironmentHost, close_of, waits
from umbra.services.environments.guard import enter_guarded
from umbra.services.environments.loading import load_environment, name_of
from umbra.services.environments.protocol import (
    EnvironmentFactory,
    Opening,
    Said,
    SampleError,
)
from umbra.services.process.parent import FRAME_HEAD, parents_end

if TYPE_CHECKING:
    from umbra.services.config import EnvironmentConfig

ASYNC_ROOM = 64  # plays at once, of an environment whose `step` is a coroutine

Message = dict[str, Any]


class Wire:
    """The pipe to the pool."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message.

        Raises:
            TypeError, ValueError, OverflowError: it has what MessagePack cannot say.
        """
        body = msgpack.packb({"type": kind, **fields}, use_bin_type=True, default=_plain)
        self._writer.write(FRAME_HEAD.pack(len(body), False) + body)

    async def receive(self) -> Message | None:
        """The next message; None if the pool has ended."""
        try:
            size, _ = FRAME_HEAD.unpack(await self._reader.readexactly(FRAME_HEAD.size))
            body = await self._reader.readexactly(size)
        except (EOFError, ConnectionError):
            return None
        return msgpack.unpackb(body, raw=False, strict_map_key=False)


class Worker:
    """Answers plays until its input ends."""

    def __init__(self, plays: EnvironmentHost, wire: Wire) -> None:
        self._plays = plays
        self._wire = wire
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by sample
        self._overdue: set[int] = set()  # plays that have been given up
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End all plays, and close all environments."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), *self._closing, return_exceptions=True)
        await self._plays.close()

    def take(self, message: Message) -> None:
        """Begin what is asked for."""
        key, number = message["key"], message["number"]
        if message["type"] == "forget":
            task = self._under_way.get(key)
            if task is not None:
                task.cancel()
            closing = asyncio.ensure_future(self._forget(message, task))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            return
        play = asyncio.ensure_future(self._play(message))
        self._under_way[key] = play
        play.add_done_callback(lambda _: self._over(key, number, play))

    async def _play(self, play: Message) -> None:
        number = play["number"]
        task = asyncio.current_task()

        def give_up() -> None:
            self._overdue.add(number)
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(play["limit_s"], give_up)
        try:
            said = [r if isinstance(r, str) else Said(**r) for r in play["responses"]]
            answer = await self._plays.play(play["key"], play["row"], said)
            if isinstance(answer, Opening):
                self._wire.send("played", number=number, opening=answer)
            else:
                steps = answer if isinstance(answer, list) else [answer]
                self._wire.send("played", number=number, steps=steps)
        except SampleError as error:
            exhausted = isinstance(error.__cause__, MemoryError)
            self._wire.send("played", number=number, error=str(error), exhausted=exhausted)
        except (TypeError, ValueError, OverflowError) as error:
            self._wire.send("played", number=number, error=f"the environment's answer: {error}")
        finally:
            timer.cancel()

    async def _forget(self, message: Message, under_way: asyncio.Task[None] | None) -> None:
        if under_way is not None:
            await asyncio.wait({under_way})
        try:
            await asyncio.wait_for(self._plays.forget(message["key"]), message["limit_s"])
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one before Python 3.11
            print(f"close() of an environment took longer than {message['limit_s']:g} s")
        if number := message["number"]:
            self._wire.send("played", number=number, error="closed")

    def _over(self, key: str, number: int, task: asyncio.Task[None]) -> None:
        if self._under_way.get(key) is task:
            del self._under_way[key]
        if number in self._overdue:
            self._overdue.discard(number)
            self._wire.send("played", number=number, overdue=True)
        elif task.cancelled():
            self._wire.send("played", number=number, error="its sample is over")
        elif (error := task.exception()) is not None:
            self._wire.send("played", number=number, error=f"the environment: {error!r}")


def hello(make: EnvironmentFactory) -> dict[str, Any]:
    """What a worker says first (`worker_pool.Hello`).

    It takes one play at a time if the environment's methods may block.
    """
    environment = make()
    return {
        "room": ASYNC_ROOM if waits(environment) else 1,
        "closes": close_of(environment) is not None,
        "lasting": getattr(environment, "lasting", False),
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{value!r} is not plain data")


def _limit_memory(mib: int) -> None:
    """Let this process have so much more address space than it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    limit = (mib << 20) + address_space
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def _serve() -> None:
    wire = Wire(*await asyncio.open_unix_connection(sock=parents_end()))
    setup = await wire.receive()
    if setup is None:
        return
    # The section as the pool has it, without its class, which needs msgspec.
    config = cast("EnvironmentConfig", SimpleNamespace(**setup))
    try:
        make = load_environment(config)
        said = hello(make)
    except UmbraError as error:
        wire.send("hello", usage_error=str(error))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # some libraries set a handler of their own
    if config.memory_mb:
        _limit_memory(config.memory_mb)
    wire.send("hello", **said)
    worker = Worker(EnvironmentHost(make, name_of(config)), wire)
    while (message := await wire.receive()) is not None:
        worker.take(message)
    await worker.close()


def main() -> None:
    """Serve the process that started this one."""
    # Ctrl-C is for the parent: it ends this process, after it has handed its samples back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter_guarded()
    asyncio.run(_serve())
    atexit._run_exitfuncs()  # where some libraries end what they have started
    os._exit(0)  # a thread of the user's must not hold the process
