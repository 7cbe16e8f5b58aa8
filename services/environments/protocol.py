"""The interface of an environment: one conversation with the model, and its reward.

An environment is an object per sample: `reset(row)` opens the conversation, `step(response)`
answers the model's turn, `close()`, if there is one, is called when the sample is over; all may be
plain or async. A user's class runs in processes of its own (`pool.py`), where it may block.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from umbra.proto.errors import UmbraError

Message = dict[str, Any]  # {"role": ..., "content": ...}
Row = dict[str, Any]  # a line of the prompts file
Tool = Callable[..., Any]
"""A function that the model may call. Its name, its parameters with their types, and the first line
of its docstring are sent to the model; its return value is answered as text."""


@dataclass(frozen=True)
class Opening:
    """The model's first prompt: `messages`, and the JSON schemas of the `tools` it may call.

    A tool that is a function becomes its schema.
    """

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.tools, list):  # a non-list fails the sample by name
            schemas = [schema(tool) if callable(tool) else tool for tool in self.tools]
            object.__setattr__(self, "tools", schemas)


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
    ) -> list[Message] | Opening | Awaitable[list[Message]] | Awaitable[Opening]: ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """Return the answer to the text that the model said."""
        ...


EnvironmentFactory = Callable[[], Environment]


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """A turn of the model as it travels to an environment.

    `text` is the whole turn without the token that ended it, `content` without reasoning and calls
    too. `tool_calls` are as in an assistant's message of a chat template, with arguments as
    objects. `problem` says why what looks like a call is none; then it is part of `content`.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    stop: str = ""  # the stop string that ended the turn; no part of the others


class Response(str):
    """The argument of `Environment.step`: the text of the turn, which is a `str`, and its parts."""

    __slots__ = ("content", "problem", "reasoning", "stop", "tool_calls")

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    problem: str
    stop: str

    @classmethod
    def of(cls, turn: ParsedTurn | str) -> Response:
        """Return the response that an environment gets; a `str` is nothing but words."""
        if isinstance(turn, str):
            turn = ParsedTurn(text=turn, content=turn)
        response = cls(turn.text)
        for part in cls.__slots__:
            setattr(response, part, getattr(turn, part))
        return response


def tool_schema(
    name: str, description: str | None = None, parameters: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a tool as chat templates take it; `parameters` is a JSON schema."""
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in fields.items() if value not in (None, "")}
    return {"type": "function", "function": function}


_TYPES = {"int": "integer", "float": "number", "bool": "boolean"}


def schema(function: Tool) -> dict[str, Any]:
    """Return the JSON schema of a function, as chat templates take it."""
    named = inspect.signature(function).parameters
    kinds = {name: getattr(p.annotation, "__name__", p.annotation) for name, p in named.items()}
    parameters = {
        "type": "object",
        "properties": {name: {"type": _TYPES.get(k, "string")} for name, k in kinds.items()},
        "required": [name for name, p in named.items() if p.default is p.empty],
    }
    described = (inspect.getdoc(function) or "").partition("\n")[0]
    return tool_schema(function.__name__, described, parameters)


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if call_id else call


def content_of(response: str) -> str:
    """Return the words of a turn without reasoning and calls; all of a plain `str`."""
    return response.content if isinstance(response, Response) else response


class SampleError(UmbraError):
    """One sample failed because of its data or its environment; the others go on."""


def prompt_messages(row: Row) -> list[Message]:
    """Return the messages in a row's "prompt": a list of them, or the text of one."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return list(prompt)
    raise SampleError('a row of data.prompts has no "prompt" that is a text or a list of messages')


def expected_answer(row: Row, kind: str) -> str:
    if "answer" not in row:
        raise SampleError(f'environment "{kind}" needs "answer" in every row of its prompts')
    return str(row["answer"]).strip()


def finite_number(value: Any, name: str) -> float:
    """Return `value`, which the user's `name` returned, as a float; SampleError if it is none."""
    try:
        if not isinstance(value, str) and math.isfinite(value):
            return float(value)
    except TypeError:
        pass
    raise SampleError(f"{name} returned {value!r}, which is not a finite number")


class RefusedError(UmbraError):
    """A refusal of an ask for a turn; the sample stays as it is. `code` is for programs."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


ENDS = {"turn_limit_reached": "turns", "context_length_exceeded": "length"}
"""Finish reasons of samples that get no more turn, by the code of the refusal."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, T tokens, as it was sampled."""

    parsed: ParsedTurn
    token_ids: list[int]
    logprobs: list[float]
    pieces: list[str]  # the tokens as text, if they were asked for
    prompt_tokens: int  # all tokens before it
    complete: bool  # the model ended it itself
    version: int  # of the newest token


Delivered = Opening | StepResult | list[StepResult]  # a list: one for each sample of a group


@dataclass(frozen=True, slots=True)
class Begun:
    """An agent works on the sample from now on; what it asks for comes when it likes."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The environment or agent of the sample is gone: the sample begins again, for another one."""

    reason: str = ""  # if the sample may be what ended it


@dataclass(frozen=True, slots=True)
class Ask:
    """An agent's wish for one turn of the model.

    `messages` are all since the model's last turn, in the first ask all there are. `after` is the
    turn that they follow, counted from 0 in the order of the asks that got one; None where they
    begin a conversation.
    """

    reply: Callable[[Turn | UmbraError], None]  # called once, from any thread
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)  # of that turn, as the agent has them
    after: int | None = None
    max_tokens: int = 0  # of the turn, at most; 0 = as configured
    pieces: bool = False
    stops: tuple[str, ...] = ()  # texts that end the turn, besides the run's


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The outcome of a play: an answer, or the reason why there is none. Agents ask in between."""

    key: str
    value: Delivered | Ask | Begun | Lost | None = None
    error: str = ""
