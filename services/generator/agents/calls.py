"""Requests for completions: decoded once for all protocols, checked against the run's sampling.

Each is an `AgentProtocol` (`protocols.py`): it turns what its clients say into a `Call`, and the
model's `Answer` into what they understand.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec

from umbra.proto.errors import UNREADABLE
from umbra.proto.records import Sampling
from umbra.services.environments.protocol import Message, Turn, tool_call
from umbra.services.generator.checks import REMEDY, UNREAD
from umbra.services.http import ApiError

log = logging.getLogger(__name__)

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "include", "truncation", "client_metadata", "max_tool_calls"),
    *("cache_control", "container", "inference_geo"),
}
"""Fields that say how to answer, not what: they have no meaning here, and change no token."""
_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "required", {"type": "auto"}, {"type": "any"}),
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "top_logprobs": (0,),
    "background": (False,),
}
"""Fields that are served with these values only; the model is free to call no tool."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_OVERRULED = {
    *_SAMPLING,
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "thinking", "output_config"),
    "context_management",
}
"""Fields that ask for other tokens than the run draws."""
_STOPS, _STOP_CHARS = 64, 1024  # each new token is compared with the texts that end a turn


@dataclass(frozen=True, slots=True)
class CallRules:
    """The run's choices, which calls may repeat but not change: `overruled` names those that try.

    `stop_tokens` end the model's turns anyway; without `reads_calls` tools are refused.
    """

    sampling: Sampling
    stop_tokens: Sequence[str] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reads_calls: bool = True
    overruled: set[str] = field(default_factory=set[str])

    def overrule(self, name: str, value: Any) -> None:
        """Ignore a field that asks for other tokens; the first request that has it is logged."""
        if name not in self.overruled:
            log.info("requests' %s, as %s, is ignored: the run sets it", name, str(value)[:80])
        self.overruled.add(name)


@dataclass(frozen=True, slots=True)
class Call:
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # of tools that have one
    max_tokens: int = 0  # 0 = as configured
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    follows: str = ""  # the id of the response that `messages` go on from; "" = they are all


class Body(msgspec.Struct, kw_only=True):
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    # The fields of a request: `AgentProtocol.reads` names the ones that each protocol has.
    messages: list[dict[str, Any]] | None = None
    input: str | list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    previous_response_id: str | None = None


_ASKED = Body.__struct_fields__[Body.__struct_fields__.index("messages") :]


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model; `message` is as chat templates take it.

    `number` counts the turns of its session from 0.
    """

    turn: Turn
    number: int
    message: Message
    finish_reason: str

    @classmethod
    def of(cls, turn: Turn, call: Call, number: int) -> Answer:
        """Return the answer to `call`: text, and tool calls if the call named tools.

        Calls are objects only if all of them are well formed; else they stay text, for the agent
        to answer. The ids of tool calls are the same whenever the turn is played again.
        """
        answer = turn.parsed
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if made := [call["function"] for call in answer.tool_calls] if call.tools else []:
            message["tool_calls"] = [
                tool_call(function["name"], function["arguments"], f"call_{number}_{index}")
                for index, function in enumerate(made)
            ]
        reason = "tool_calls" if made else "stop"
        return cls(turn, number, message, reason if turn.complete else "length")

    @property
    def tokens(self) -> tuple[int, int]:
        """Return how many tokens the trajectory has before the turn, and how many the turn has."""
        return self.turn.prompt_tokens, len(self.turn.token_ids)


@dataclass(frozen=True, slots=True)
class AgentProtocol(ABC):
    """A protocol, within one session; `created` is in seconds since the epoch."""

    session: str
    model: str
    created: int
    reads: ClassVar[tuple[str, ...]]
    """The fields of `Body` that carry the request; other protocols' fields are refused."""

    @classmethod
    @abstractmethod
    def read(cls, request: Body, rules: CallRules) -> Call:
        """Return messages and tools of a request; raises ApiError, which names the field."""

    @classmethod
    def call(cls, body: bytes, rules: CallRules) -> Call:
        """Return the call in the body of a request; ApiError names a field that is not served."""
        request = _decoded(body, cls.reads, rules)
        call = cls.read(request, rules)
        if not call.messages:
            raise ApiError(f"{cls.reads[0]} is empty", param=cls.reads[0])
        if call.tools and not rules.reads_calls:
            raise ApiError(f"{UNREAD}: {REMEDY}", code="tools_unread", param="tools")
        stop = request.stop or request.stop_sequences or []
        stops = [stop] if isinstance(stop, str) else stop
        if not all(stops) or request.stop == "":
            raise ApiError("a stop string is empty", param="stop")
        if len(stops) > _STOPS or any(len(text) > _STOP_CHARS for text in stops):
            sentence = f"{_STOPS} stop strings of {_STOP_CHARS} characters are the most"
            raise ApiError(sentence, param="stop")
        limits = (request.max_tokens, request.max_completion_tokens, request.max_output_tokens)
        most = min((limit for limit in limits if limit is not None), default=None)
        if most is not None and most < 1:
            raise ApiError(f"max_tokens = {most}: use 1 or more", param="max_tokens")
        return replace(
            call,
            max_tokens=most or 0,
            # Without the tokens that end the model's turns anyway.
            stops=tuple(text for text in stops if text not in rules.stop_tokens),
            stream=bool(request.stream),
            stream_usage=bool((request.stream_options or {}).get("include_usage")),
        )

    @abstractmethod
    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return a reply in one piece."""

    @abstractmethod
    def events(self, call: Call, answer: Answer) -> bytes:
        """Return a reply as server-sent events."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return a refusal."""
        return error.body()

    @abstractmethod
    def broken(self, error: ApiError) -> bytes:
        """Return a refusal as the event that ends a stream."""


def event(name: str, /, **fields: Any) -> bytes:
    """Return a server-sent event with a name, which is also its "type"."""
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def continues(old: Message, new: Message) -> bool:
    """Return whether `new` is `old` as it comes back, white space and missing reasoning aside."""
    if "reasoning_content" not in new:
        old = {name: value for name, value in old.items() if name != "reasoning_content"}
    first, second = (
        {k: v.strip() if isinstance(v, str) else v for k, v in m.items()} for m in (old, new)
    )
    return first == second


def _decoded(body: bytes, reads: Sequence[str], rules: CallRules) -> Body:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(fields, Body)
    except UNREADABLE as error:
        _, has_path, path = str(error).rpartition("`$.")
        param = path.rstrip("`") if has_path else None
        raise ApiError(f"the body is not a valid request: {error}", param=param) from error
    typed = {*Body.__struct_fields__, *_IGNORED} - {*_ASKED, *_SAMPLING} | {*reads}
    asked = {name: value for name, value in fields.items() if name not in typed}
    for section in ("reasoning", "text"):
        parts = getattr(request, section) or {}
        asked |= {f"{section}.{name}": value for name, value in parts.items()}
    if not (kwargs := request.chat_template_kwargs or {}).items() <= rules.template_options.items():
        rules.overrule("chat_template_kwargs", kwargs)
    # Tokens that are trained on must have been drawn as the run says.
    own = msgspec.structs.asdict(rules.sampling)
    for name, value in asked.items():
        if value is None or value == own.get(name) or value in _SERVED.get(name, ()):
            continue
        shown = msgspec.json.encode(value).decode()[:80]
        if name in _SERVED:
            expected = msgspec.json.encode(_SERVED[name][0]).decode()
            raise ApiError(f"{name} = {shown} is not supported: use {expected}", param=name)
        if name not in _OVERRULED and "." not in name:
            raise ApiError(f"{name} is not supported here: leave it out", param=name)
        rules.overrule(name, shown)
    return request


_KNOWN = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning"}
_CARRIED = {"provider_specific_fields", "annotations"}
"""Fields that client libraries add, for themselves, to the messages that they got."""


def read_message(message: dict[str, Any], where: str) -> Message:
    """Return a message as chat templates take it: text, and arguments of calls as objects."""
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError(f"{where} has no role", param=where)
    for name, value in message.items():
        if value and name not in _KNOWN and name not in _CARRIED:
            raise ApiError(f"{where}.{name} is not supported", param=f"{where}.{name}")
    clean: Message = {
        "role": "system" if role == "developer" else role,
        "content": read_content(message.get("content"), f"{where}.content"),
    }
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought and role == "assistant":
        clean["reasoning_content"] = read_content(thought, f"{where}.reasoning_content")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            clean[name] = str(message[name])
    if calls := message.get("tool_calls"):
        where = f"{where}.tool_calls"
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ApiError(f"{where} is malformed", param=where)
        clean["tool_calls"] = [
            read_call(call, "id", call.get("function") or {}, where) for call in calls
        ]
    return clean


def read_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise ApiError(f"{where} must be text", param=where)


def read_call(call: dict[str, Any], id_name: str, function: Any, where: str) -> dict[str, Any]:
    """Return a tool call as chat templates take it; clients send its arguments as JSON."""
    try:
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments)
        read = msgspec.json.decode(text, type=dict[str, Any])
        return tool_call(str(function["name"]), read, str(call[id_name]))
    except (TypeError, KeyError, *UNREADABLE) as error:
        raise ApiError(f"{where} is malformed: {error!r}", param=where) from error


def checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return `tool`; raise ApiError unless templates and parsers can take it."""
    function = tool.get("function")
    kinds = {"name": str, "description": str | None, "parameters": dict | None}
    if isinstance(function, dict) and all(isinstance(function.get(k), kinds[k]) for k in kinds):
        return tool
    raise ApiError(
        "every entry of tools needs a function with a name; its description is text, its "
        "parameters are an object",
        param="tools",
    )


def response_id(session: str, number: int) -> str:
    """Return the id of the response that is turn `number` of a session."""
    return f"resp_{session[:12]}_{number}"
