"""Environments as TRL's trainers take them: a class whose public methods are the model's tools.

    reset(**row) -> str | None     appended to the last message of the prompt
    any public method              a tool; its docstring and annotations are the schema
    get_reward() -> float          optional

Calls and their order are as in `trl` 1.16, `experimental/async_grpo/async_rollout_worker.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.environments.agent_program import Conversation, Program, arguments_of, library
from umbra.services.environments.protocol import Row, SampleError, StepResult, finite_number
from umbra.services.environments.rewards import Rewards

_NO_TOOLS = ("reset", "get_reward", "close")


def trl_program(
    make: Callable[[], Any], rewards: Rewards, name: str, tool_rounds: int = 0
) -> Program:
    """Return the program of TRL's `environment_factory`, which users call `name`.

    Values of `rewards` are added to `get_reward`'s. After `tool_rounds` turns with calls the
    sample ends; 0 = never (TRL's `max_tool_calling_iterations`).
    """
    probe = make()
    methods = [m for m, _ in inspect.getmembers(type(probe), predicate=inspect.isfunction)]
    if "reset" not in methods:
        raise UsageError(f"{name} has no method reset")
    if "get_reward" not in methods and not rewards.any:
        raise UsageError(f"{name} has no method get_reward: name a function in environment.reward")
    tools = [m for m in methods if m not in _NO_TOOLS and not m.startswith("_")]
    schemas = [_schema(getattr(probe, tool), f"{name}: {tool}") for tool in tools]
    idle = [probe]  # as in TRL, an object is made once and reset often

    async def play(row: Row, endpoint: dict[str, str]) -> StepResult:
        environment = idle.pop() if idle else make()
        try:
            result = await _play(environment, row, endpoint)
        except BaseException:
            if callable(close := getattr(environment, "close", None)):  # its state is unknown
                await _call(close)
            raise
        idle.append(environment)
        return result

    async def _play(environment: Any, row: Row, endpoint: dict[str, str]) -> StepResult:
        columns = {key: value for key, value in row.items() if key != ENVIRONMENT}
        observation = await _call(environment.reset, **columns)
        if not isinstance(observation, str | None):
            shown = type(observation).__name__
            raise SampleError(f"{name}: reset returned {shown}; only text can be shown")
        conversation = Conversation(endpoint, row, observation or "", schemas)
        begins = len(conversation.messages)
        rounds = 0
        counts = {"tool_calls": 0.0, "failed_calls": 0.0} if tools else {}
        while turn := await conversation.ask():
            calls = turn.get("tool_calls") or []
            if not calls:
                break
            if rounds == tool_rounds > 0:
                conversation.reason = "turns"
                break
            rounds += 1
            for call in calls:
                reply, failed = await _tool(environment, call, tools)
                counts["tool_calls"] += 1
                counts["failed_calls"] += failed
                conversation.answer(call, reply)
        total, parts = 0.0, counts
        if rewards.any:
            completion = conversation.messages[begins:]
            turns = [message for message in completion if message["role"] == "assistant"]
            text = turns[-1].get("content") or ""
            results = rewards.results(row, [completion], [text], {"environments": [environment]})
            (scored,) = await results if inspect.isawaitable(results) else results
            total, parts = scored.reward, {**counts, **scored.reward_parts}
        if "get_reward" in methods:
            score = finite_number(await _call(environment.get_reward), f"{name}: get_reward")
            total, parts = total + score, {**parts, type(environment).__name__: score}
        return StepResult(reward=total, reward_parts=parts, reason=conversation.reason)

    return play


async def _tool(environment: Any, call: dict[str, Any], tools: list[str]) -> tuple[str, bool]:
    """Return a tool's answer, and whether it failed; the model gets errors in TRL's words."""
    function = call["function"]["name"]
    if function not in tools:
        return str({"error": f"unknown tool {function}"}), True
    try:
        return str(await _call(getattr(environment, function), **arguments_of(call))), False
    except Exception as error:  # noqa: BLE001 - a tool may raise anything
        return str({"error": str(error)}), True


async def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return the result of a coroutine, or of a function in its own thread, as it may wait."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)

    def run() -> Any:
        try:
            return function(**arguments)
        except StopIteration as error:
            raise RuntimeError(repr(error)) from error  # no future of asyncio takes it

    # Of its own: a call that hangs must not take a place that others need.
    thread = ThreadPoolExecutor(1, "a method of the environment")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, run)
    finally:
        thread.shutdown(wait=False)


def _schema(method: Callable[..., Any], name: str) -> dict[str, Any]:
    needs = "transformers, as TRL does"
    module = library("transformers.utils.chat_template_utils", "trl", needs)
    try:
        return module.get_json_schema(method)
    except (module.DocstringParsingException, module.TypeHintParsingException) as error:
        raise UsageError(f"{name} makes no tool: {error}") from error
