"""Requests for completions: decoded, checked against the run's sampling, and made comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from umbra.proto.errors import UNREADABLE
from umbra.proto.records import Sampling
from umbra.services.environments.protocol import Message
from umbra.services.generator.agents.errors import ApiError

# Those that say how to answer, not what: they have no meaning here, and change no token.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields of OpenAI's that are served with these values only."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """What the run has decided, and calls may repeat but not change."""

    sampling: Sampling
    stop_tokens: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A request for one completion: of a chat, or of plain `text`."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    max_tokens: int = 0  # 0 = as configured
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None


class _TextBody(_Body, kw_only=True):
    prompt: str | list[str]
    logprobs: int | None = None


B = TypeVar("B", bound=_Body)


def read_chat(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/chat/completions`.

    Raises:
        ApiError: it is not one, or not one that this run can serve; names the field.
    """
    asked = _decoded(body, _ChatBody, rules)
    if not asked.messages:
        raise ApiError("messages is empty", param="messages")
    tools = asked.tools or []
    if not all(isinstance(tool.get("function"), dict) for tool in tools):
        raise ApiError('every entry of tools needs "function"', param="tools")
    return Call(
        messages=[_message(message, i) for i, message in enumerate(asked.messages)],
        tools=tools,
        max_tokens=_max_tokens(asked),
        logprobs=bool(asked.logprobs),
        stream=bool(asked.stream),
        stream_usage=bool((asked.stream_options or {}).get("include_usage")),
    )


def read_text(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/completions`; errors as of `read_chat`."""
    asked = _decoded(body, _TextBody, rules)
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if len(prompts) != 1:
        raise ApiError(f"prompt has {len(prompts)} texts: a session is one", param="prompt")
    if asked.logprobs:
        raise ApiError(
            f"logprobs = {asked.logprobs} asks for other tokens than the sampled ones: use 0",
            param="logprobs",
        )
    return Call(
        text=prompts[0],
        max_tokens=_max_tokens(asked),
        logprobs=asked.logprobs is not None,
        stream=bool(asked.stream),
        stream_usage=bool((asked.stream_options or {}).get("include_usage")),
    )


def comparable(message: Message) -> Message:
    """`message` in the form in which histories are compared: white space around it is no edit."""
    return {**message, "content": message["content"].strip()}


def read_reply(message: Message) -> Message:
    """An assistant's message that we have sent, as it reads when it comes back."""
    return _message(message, 0)


def _decoded(body: bytes, kind: type[B], rules: CallRules) -> B:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        asked = msgspec.convert(fields, kind)
    except UNREADABLE as error:
        raise ApiError(f"the body is not a valid request: {error}", param=_path(error)) from error
    served = {*kind.__struct_fields__, *_IGNORED}
    for name, value in fields.items():
        if name in served or value is None:
            continue
        if name not in _NEUTRAL:
            raise ApiError(f"{name} is not supported here: leave it out", param=name)
        if value not in _NEUTRAL[name]:
            wanted = " or ".join(msgspec.json.encode(v).decode() for v in _NEUTRAL[name])
            given = msgspec.json.encode(value).decode()[:80]
            raise ApiError(f"{name} = {given} is not supported: use {wanted}", param=name)
    _agree(asked, rules)
    return asked


def _agree(asked: _Body, rules: CallRules) -> None:
    """What is trained on must have been drawn as the run says, so no call may draw otherwise."""
    for name in ("temperature", "top_p", "top_k", "min_p"):
        given, wanted = getattr(asked, name), getattr(rules.sampling, name)
        if given is not None and given != wanted:
            raise ApiError(
                f"{name} = {given:g}, but the run samples with sampling.{name} = {wanted:g}: leave "
                "it out, or change the run",
                param=name,
            )
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    for stop in stops:
        if stop not in rules.stop_tokens:
            raise ApiError(
                f"stop = {stop!r} is not among the run's sampling.stop_tokens: add it there, or "
                "leave it out",
                param="stop",
            )


def _max_tokens(asked: _Body) -> int:
    given = [
        limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None
    ]
    if any(limit < 1 for limit in given):
        raise ApiError(f"max_tokens = {min(given)}: use 1 or more", param="max_tokens")
    return min(given, default=0)


_KNOWN = {"role", "content", "name", "tool_call_id", "tool_calls"}


def _message(message: dict[str, Any], index: int) -> Message:
    """A message as chat templates take it: text, and arguments of tool calls as objects."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise ApiError(f"{where} has no role", param=where)
    for name, value in message.items():
        if name not in _KNOWN and value:
            raise ApiError(f"{where}.{name} is not supported", param=f"{where}.{name}")
    clean: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            clean[name] = str(message[name])
    if message.get("tool_calls"):
        clean["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return clean


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise ApiError(f"{where} must be text", param=where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    try:
        return [
            {
                "id": str(call["id"]),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": _arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    except (TypeError, KeyError, *UNREADABLE) as error:
        raise ApiError(f"{where} is malformed: {error!r}", param=where) from error


def _arguments(arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments)
    return msgspec.json.decode(text, type=dict[str, Any])


def _path(error: Exception) -> str | None:
    """The field that an error of msgspec names."""
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None
