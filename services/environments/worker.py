"""A process that runs a user's environments.

The pool that started it asks over a pipe (`worker_pool.py`). What the user's code prints goes
to stderr.

python -P -m umbra.services.environments.worker
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.guard import enter_guarded
from umbra.services.environments.loading import load_environment, name_of
from umbra.services.environments.protocol import (
    Delivered,
    Environment,
    EnvironmentFactory,
    Opening,
    ParsedTurn,
    Response,
    Row,
    SampleError,
    StepResult,
    finite_number,
)
from umbra.services.process.parent import parents_end
from umbra.services.process.pipe import AsyncPipe

ASYNC_ROOM = 64  # plays at once, of an environment that lets others play meanwhile


class Setup(msgspec.Struct, tag="setup"):
    """First to a worker: its environment, without the keys that it has as one of several."""

    config: EnvironmentConfig


class Hello(msgspec.Struct, tag="hello"):
    """First from a worker, or why it can't work."""

    room: int = 1  # plays at once
    closes: bool = False  # environments have to be closed
    usage_error: str = ""


class Play(msgspec.Struct, tag="play"):
    """To a worker: arguments of `EnvironmentHost.play`."""

    number: int
    key: str
    row: dict[str, Any] = {}
    responses: list[ParsedTurn | str] = []


class Forget(msgspec.Struct, tag="forget"):
    """To a worker: the sample is over. With a number it reports that its environment is closed."""

    key: str
    number: int = 0


class Played(msgspec.Struct, tag="played"):
    """From a worker: answers, or why there are none."""

    number: int
    opening: Opening | None = None
    steps: list[StepResult] = []
    error: str = ""
    exhausted: bool = False  # memory ran out, it leaves
    overdue: bool = False  # the call that was under way took too long


def _waits(environment: Environment) -> bool:
    """True if it lets others play meanwhile; one whose methods may block has its process alone."""
    asks = inspect.iscoroutinefunction(environment.step)
    return asks or bool(getattr(environment, "concurrent", False))


class EnvironmentHost:
    """The environments of samples, each from its opening until it is forgotten."""

    def __init__(self, make: EnvironmentFactory, name: str) -> None:
        self._make = make
        self._name = name
        self._environments: dict[str, Environment] = {}

    async def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> Delivered:
        """Return the answer of sample `key`'s environment to the last of `responses`.

        Without responses the conversation is opened, again if there is one; a response to one that
        is not open opens it first. An environment with `step_all` judges a group: `responses` has
        one of each sample, and each gets an answer. Its exceptions become a SampleError.
        """
        try:
            environment = self._environments.get(key)
            if environment is None or not responses:
                await self.forget(key)
                environment = self._environments[key] = self._make()
                opening = await _answer(environment, environment.reset, row)
                if not isinstance(opening, Opening):
                    opening = Opening(opening)
                self._check(opening.messages, _is_message, "reset gave", _MESSAGES)
                self._check(opening.tools, _is_tool, "reset gave tools", "schemas")
                if not responses:
                    return Opening(opening.messages, opening.tools)
            if step_all := getattr(environment, "step_all", None):
                turns = [Response.of(response) for response in responses]
                return [*map(self._checked, await _answer(environment, step_all, turns))]
            turn = Response.of(responses[-1])
            return self._checked(await _answer(environment, environment.step, turn))
        except (Exception, SystemExit) as error:
            if isinstance(error, SampleError):
                raise
            raise SampleError(f"{self._name} raised {type(error).__name__}: {error}") from error

    async def forget(self, key: str) -> None:
        """End a sample: its environment is closed."""
        environment = self._environments.pop(key, None)
        close = getattr(environment, "close", None)
        if environment is None or not callable(close):
            return
        try:
            await _answer(environment, close)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - its sample is over already
            print(f"{self._name}: close raised {type(error).__name__}: {error}")

    async def close(self) -> None:
        for key in list(self._environments):
            await self.forget(key)

    def _checked(self, result: Any) -> StepResult:
        if not isinstance(result, StepResult):
            raise SampleError(
                f"{self._name}: step returned {type(result).__name__} instead of a StepResult"
            )
        self._check(result.messages, _is_message, "step gave", _MESSAGES)
        self._check(result.tool_calls, _is_call, "step gave tool_calls", _CALLS)
        reward = finite_number(result.reward, f"{self._name}: step")
        parts = {
            str(part): finite_number(value, f"{self._name}: part {part!r}")
            for part, value in result.reward_parts.items()
        }
        done, reason = bool(result.done), str(result.reason)
        return StepResult(reward, done, result.messages, parts, reason, result.tool_calls)

    def _check(
        self, values: Any, fits: Callable[[dict[str, Any]], bool], gave: str, wanted: str
    ) -> None:
        """Raise SampleError unless `values` is a list of objects that are as they should be."""
        if not isinstance(values, list) or not all(
            isinstance(value, dict) and all(isinstance(key, str) for key in value) and fits(value)
            for value in values
        ):
            raise SampleError(f"{self._name}: {gave} {values!r} instead of {wanted}")


_MESSAGES = 'a list of {"role": ..., "content": ...} whose contents are texts'
_CALLS = 'a list of {"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}'


def _is_message(value: dict[str, Any]) -> bool:
    silent = value.get("content") is None and bool(value.get("tool_calls"))
    return isinstance(value.get("role"), str) and (silent or isinstance(value.get("content"), str))


def _is_tool(value: dict[str, Any]) -> bool:
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_call(value: dict[str, Any]) -> bool:
    return _is_tool(value) and isinstance(value["function"].get("arguments"), dict)


async def _answer(environment: Environment, method: Callable[..., Any], *args: Any) -> Any:
    """Return the result of the user's method, plain or async."""
    alone = asyncio._get_running_loop() is None  # in the pool within this process
    if alone or _waits(environment) or inspect.iscoroutinefunction(method):
        result = method(*args)
    else:
        with _no_loop():
            result = method(*args)
            if asyncio.isfuture(result):  # of the loop that it found
                return result.get_loop().run_until_complete(result)
    return await result if inspect.isawaitable(result) else result


_plain_loops: list[asyncio.AbstractEventLoop] = []
"""The loop that plain methods find by `asyncio.get_event_loop`, once one was called."""


@contextmanager
def _no_loop() -> Iterator[None]:
    """Hide our loop, as in a script: `asyncio.run` works, or the loop of `get_event_loop`.

    `run_sync` of many libraries is the latter. Ours stands still while a plain method works, so
    nobody misses it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    if not _plain_loops or _plain_loops[0].is_closed():
        _plain_loops[:] = [asyncio.new_event_loop()]
    asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(_plain_loops[0])
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)


class Worker:
    """A server of plays that come over a pipe, until that ends."""

    def __init__(
        self,
        pipe: AsyncPipe[Setup | Play | Forget],
        host: EnvironmentHost,
        config: EnvironmentConfig,
    ) -> None:
        self._pipe, self._host = pipe, host
        self._limit_s = config.timeout_s
        self._play_s = None if config.asks else config.timeout_s  # agents are watched elsewhere

    async def serve(self) -> None:
        plays: dict[str, asyncio.Task[None]] = {}  # by sample, its newest
        tasks: set[asyncio.Task[None]] = set()
        while isinstance(message := await self._pipe.receive(), Play | Forget):
            key = message.key
            if isinstance(message, Play):
                task = plays[key] = asyncio.create_task(self._play(message))
            else:
                task = asyncio.create_task(self._forget(message, plays.pop(key, None)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for play in plays.values():
            play.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._host.close()

    async def _play(self, play: Play) -> None:
        played = partial(Played, play.number)
        try:
            async with asyncio.timeout(self._play_s):
                answer = await self._host.play(play.key, play.row, play.responses)
            if isinstance(answer, Opening):
                self._send(played(opening=answer))
            else:
                self._send(played(steps=answer if isinstance(answer, list) else [answer]))
        except TimeoutError:
            self._send(played(overdue=True))
        except SampleError as error:
            exhausted = isinstance(error.__cause__, MemoryError)
            self._send(played(error=str(error), exhausted=exhausted))
        except asyncio.CancelledError:
            self._send(played(error="its sample is over"))
        except Exception as error:  # noqa: BLE001 - no MessagePack, or a bug: one sample's
            self._send(played(error=f"the environment's answer: {error}"))

    def _send(self, played: Played) -> None:
        self._pipe.send(msgspec.to_builtins(played, builtin_types=(bytes,), enc_hook=_plain))

    async def _forget(self, over: Forget, play: asyncio.Task[None] | None) -> None:
        if play is not None:
            play.cancel()  # which has begun: it answers
            await asyncio.wait({play})
        try:
            await asyncio.wait_for(self._host.forget(over.key), self._limit_s)
        except TimeoutError:
            print(f"close() of an environment took longer than {self._limit_s:g} s")
        if over.number:
            self._send(Played(over.number, error="closed"))


def _plain(value: Any) -> Any:
    """Return a text or number of a class of its own, such as a `Response`, without that class."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r} is not plain data")


def _limit_memory(mib: int) -> None:
    """Limit this process to so much more address space than it uses now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    limit = (mib << 20) + address_space
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def _serve() -> None:
    pipe: AsyncPipe[Setup | Play | Forget] = AsyncPipe(parents_end(), Setup | Play | Forget)
    setup = await pipe.receive()
    if not isinstance(setup, Setup):
        return
    config = setup.config
    try:
        make = load_environment(config)
        environment = make()
    except UmbraError as error:
        pipe.send(Hello(usage_error=str(error)))
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # some libraries set a handler of their own
    if config.memory_mb:
        _limit_memory(config.memory_mb)
    closes = callable(getattr(environment, "close", None))
    pipe.send(Hello(ASYNC_ROOM if _waits(environment) else 1, closes))
    await Worker(pipe, EnvironmentHost(make, name_of(config)), config).serve()


def main() -> None:
    """Serve the process that started this one."""
    # Ctrl-C is for the parent: it ends this process, after it has handed its samples back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter_guarded()
    asyncio.run(_serve())
    atexit._run_exitfuncs()  # where some libraries end what they have started
    os._exit(0)  # a thread of the user's must not hold the process


if __name__ == "__main__":
    main()
