"""The environments of one process, by sample, and what they answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from umbra.services.environments.protocol import (
    Environment,
    EnvironmentFactory,
    Message,
    Opening,
    Response,
    Row,
    Said,
    SampleError,
    StepResult,
    finite_number,
)

Delivered = Opening | StepResult | list[StepResult]  # a list: one for each sample of a group


class GroupEnvironment(Environment, Protocol):
    """What a group of responses to one prompt is worth, told of all of them at once."""

    def step_all(
        self, responses: Sequence[Response]
    ) -> list[StepResult] | Awaitable[list[StepResult]]:
        """The end of each of `responses`, in their order."""
        ...


def close_of(environment: Environment) -> Callable[[], Any] | None:
    """Its method `close`, plain or async, if it has one."""
    close = getattr(environment, "close", None)
    return close if callable(close) else None


def waits(environment: Environment) -> bool:
    """Whether it lets others play meanwhile; one whose methods may block has its process alone."""
    asks = inspect.iscoroutinefunction(environment.step)
    return asks or bool(getattr(environment, "concurrent", False))


class EnvironmentHost:
    """Holds an environment per sample, from its opening until it is forgotten.

    Args:
        make: a fresh environment.
        name: what the user calls it, for errors.
    """

    def __init__(self, make: EnvironmentFactory, name: str) -> None:
        self._make = make
        self._name = name
        self._environments: dict[str, Environment] = {}

    async def play(self, key: str, row: Row, responses: Sequence[Said | str]) -> Delivered:
        """Return what the environment of sample `key` answers to the last of `responses`.

        Without responses the conversation is opened, anew if there is one; a response to one that
        is not open opens it first. To an environment that judges a group the `responses` are those
        of its samples, and each has an answer.

        Raises:
            SampleError: the environment raised, or answered what is no answer.
        """
        try:
            environment = self._environments.get(key)
            if environment is None or not responses:
                await self.forget(key)
                environment = self._environments[key] = self._make()
                opened = await _answer(environment, environment.reset, row)
                tools = opened.tools if isinstance(opened, Opening) else []
                messages = opened.messages if isinstance(opened, Opening) else opened
                opening = Opening(self._messages(messages, "reset"), tools)
                if not responses:
                    return opening
            if step_all := getattr(environment, "step_all", None):
                said = [Response.of(each) for each in responses]
                return [*map(self._checked, await _answer(environment, step_all, said))]
            said = Response.of(responses[-1])
            return self._checked(await _answer(environment, environment.step, said))
        except (Exception, SystemExit) as error:
            if isinstance(error, SampleError):
                raise
            raise SampleError(f"{self._name} raised {type(error).__name__}: {error}") from error

    async def forget(self, key: str) -> None:
        """The sample is over: its environment is closed."""
        environment = self._environments.pop(key, None)
        close = close_of(environment) if environment is not None else None
        if environment is None or close is None:
            return
        try:
            await _answer(environment, close)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - its sample is over already
            print(f"{self._name}: close raised {type(error).__name__}: {error}")

    async def close(self) -> None:
        """All samples are over."""
        for key in list(self._environments):
            await self.forget(key)

    def _checked(self, result: Any) -> StepResult:
        if not isinstance(result, StepResult):
            raise SampleError(
                f"{self._name}: step returned {type(result).__name__} instead of a StepResult"
            )
        return StepResult(
            reward=finite_number(result.reward, f"{self._name}: step"),
            done=bool(result.done),
            messages=self._messages(result.messages, "step"),
            reward_parts={
                str(part): finite_number(value, f"{self._name}: part {part!r}")
                for part, value in result.reward_parts.items()
            },
            reason=str(result.reason),
            tool_calls=self._calls(result.tool_calls),
        )

    def _calls(self, calls: Any) -> list[dict[str, Any]]:
        try:
            functions = [call["function"] for call in calls]
            if isinstance(calls, list) and all(
                isinstance(f["name"], str) and isinstance(f["arguments"], dict) for f in functions
            ):
                return calls
        except (TypeError, KeyError):
            pass
        raise SampleError(
            f'{self._name}: step gave tool_calls {calls!r} instead of a list of {{"id": ..., '
            '"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )

    def _messages(self, messages: Any, method: str) -> list[Message]:
        if isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
        ):
            return messages
        raise SampleError(
            f'{self._name}: {method} gave {messages!r} instead of a list of {{"role": ..., '
            '"content": ...}'
        )


async def _answer(environment: Environment, method: Callable[..., Any], *args: Any) -> Any:
    """What a method of the user's returns, plain or async."""
    if waits(environment) or inspect.iscoroutinefunction(method):
        given = method(*args)
    else:
        with _no_loop():
            given = method(*args)
            if asyncio.isfuture(given):  # of the loop that it found
                return given.get_loop().run_until_complete(given)
    return await given if inspect.isawaitable(given) else given


_theirs: list[asyncio.AbstractEventLoop] = []
"""The loop that plain methods find by `asyncio.get_event_loop`, once one was called."""


@contextmanager
def _no_loop() -> Iterator[None]:
    """As in a script: no loop runs, so `asyncio.run` may, or the one that `get_event_loop` gives.

    `run_sync` of many libraries is the latter. Ours stands still while a plain method works, so
    nobody misses it.
    """
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if loop is None or task is None:  # the pool within this process has none
        yield
        return
    if not _theirs or _theirs[0].is_closed():
        _theirs[:] = [asyncio.new_event_loop()]
    asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(_theirs[0])
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)
