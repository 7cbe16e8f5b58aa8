"""What an environment is: one conversation with the model, and what it is worth.

An environment is an object per sample: `reset(row)` opens the conversation, `step(response)`
answers the model's turn. Both may be plain or async methods. `close()`, if there is one, is called
when the sample is over. A user's class runs in processes of its own (`pool.py`), where it may
block, for `environment.timeout_s` seconds and `reset_s` in `reset`.

What a worker process imports, this module included, needs the standard library and msgpack only,
of Python 3.10 or newer: it may run in a Python environment without Umbra (`run_module.py`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from umbra.proto.errors import UmbraError

Message = dict[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Row = dict[str, Any]
"""A line of the prompts file."""


Tool = Callable[..., Any]
"""A function that the model may call. Its name, its parameters with their types, and the first line
of its docstring are told to the model; what it returns is answered as text."""


@dataclass(frozen=True)
class Opening:
    """What the model is told first: `messages`, and the JSON schemas of the `tools` it may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """The answer to one turn of the model: the end (`done`), or `messages` to go on from.

    Rewards of the turns add up. `reason` is the finish reason of a finished sample: "turns" if the
    environment's turns ran out, "stop" otherwise. `tool_calls` are the calls that the environment
    read in the model's turn, as chat templates take them, if `messages` answer calls:
    `{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}`.
    """

    reward: float = 0.0
    done: bool = True
    messages: list[Message] = field(default_factory=list)
    reward_parts: dict[str, float] = field(default_factory=dict)
    reason: str = "stop"
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class Environment(Protocol):
    """One conversation."""

    def reset(
        self, row: Row
    ) -> list[Message] | Opening | Awaitable[list[Message]] | Awaitable[Opening]:
        """The messages that the model answers first."""
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """The answer to the text that the model said."""
        ...


EnvironmentFactory = Callable[[], Environment]


class SampleError(UmbraError):
    """One sample failed because of its data or its environment; the others go on."""


def prompt_messages(row: Row) -> list[Message]:
    """The messages in a row's "prompt": a list of them, or the text of one."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return list(prompt)
    raise SampleError('a row of data.prompts has no "prompt" that is a text or a list of messages')


def expected_answer(row: Row, kind: str) -> str:
    """The row's "answer" as text."""
    if "answer" not in row:
        raise SampleError(f'environment "{kind}" needs "answer" in every row of data.prompts')
    return str(row["answer"]).strip()


def reward_result(value: Any, name: str) -> StepResult:
    """The end of a sample whose reward is the number `value`, which the user's `name` returned."""
    return StepResult(reward=finite_number(value, name))


def finite_number(value: Any, name: str) -> float:
    """`value`, which the user's `name` returned, as a float.

    Raises:
        SampleError: it is no finite number.
    """
    try:
        if not isinstance(value, str) and math.isfinite(value):
            return float(value)
    except TypeError:
        pass
    raise SampleError(f"{name} returned {value!r}, which is not a finite number")
