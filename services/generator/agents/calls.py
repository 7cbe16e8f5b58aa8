"""Requests for completions: decoded, checked against the run's sampling, and made comparable."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from umbra.proto.errors import UNREADABLE
from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import Message
from umbra.services.generator.checks import REMEDY, UNREAD
from umbra.services.http import ApiError

log = logging.getLogger(__name__)

# Those that say how to answer, not what: they have no meaning here, and change no token.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields of OpenAI's that are served with these values only."""
DRAWING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Fields that ask for other tokens than the run draws: as of `CallRules.settle`."""
_UNFORCED: dict[str, tuple[Any, ...]] = {"tool_choice": ("required", {"type": "any"})}
"""The same of fields with other values that are refused: the model is free to call no tool."""


class Overridden:
    """Counts fields by which agents asked for a sampling that they did not get."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, name: str, given: Any) -> None:
        """Count one; it is logged the 1st, 2nd, 4th, ... time."""
        self.counts[name] += 1
        count = self.counts[name]
        if not count & (count - 1):
            log.info(
                "an agent asked for %s = %s and did not get it (%d so far)",
                name,
                str(given)[:80],
                count,
            )


@dataclass(frozen=True, slots=True)
class CallRules:
    """The run's choices, which calls may repeat but not change.

    A call for another sampling gets the run's, which is counted, or is refused without `override`.
    """

    sampling: Sampling
    stop_tokens: Sequence[str] = ()
    override: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reads_calls: bool = True
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # for errors
    overridden: Overridden = field(default_factory=Overridden)

    def settle(self, name: str, given: Any, why: str) -> None:
        """Count a call for another sampling than the run's; raises ApiError if that is refused."""
        if not self.override:
            raise ApiError(why, param=name)
        self.overridden.add(name, given)


@dataclass(frozen=True, slots=True)
class Call:
    """A request for one completion: of a chat, or of plain `text`."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # of tools that have one
    text: str | None = None
    max_tokens: int = 0  # 0 = as configured
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    follows: str = ""  # the id of the response that `messages` go on from; "" = they are all


class Body(msgspec.Struct, kw_only=True):
    """What requests of all kinds have in common."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Body(Body, kw_only=True):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream_options: dict[str, Any] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None


class _TextBody(_Body, kw_only=True):
    prompt: str | list[str]
    logprobs: int | None = None


B = TypeVar("B", bound=Body)


def read_chat(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/chat/completions`.

    Raises:
        ApiError: it is not one, or not one that this run can serve; names the field.
    """
    asked = decoded(body, _ChatBody, rules)
    if not asked.messages:
        raise ApiError("messages is empty", param="messages")
    tools = asked.tools or []
    if not all(isinstance(tool.get("function"), dict) for tool in tools):
        raise ApiError('every entry of tools needs "function"', param="tools")
    return Call(
        messages=[read_message(message, i) for i, message in enumerate(asked.messages)],
        tools=readable(tools, rules),
        max_tokens=_max_tokens(asked),
        stops=stops_of(asked.stop, rules),
        logprobs=bool(asked.logprobs),
        stream=bool(asked.stream),
        stream_usage=bool((asked.stream_options or {}).get("include_usage")),
    )


def read_text(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/completions`; errors as of `read_chat`."""
    asked = decoded(body, _TextBody, rules)
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
        stops=stops_of(asked.stop, rules),
        logprobs=asked.logprobs is not None,
        stream=bool(asked.stream),
        stream_usage=bool((asked.stream_options or {}).get("include_usage")),
    )


def continues(old: Message, new: Message) -> bool:
    """Return whether `new` is `old` as it comes back, white space and missing reasoning aside."""
    if "reasoning_content" not in new:
        old = {name: value for name, value in old.items() if name != "reasoning_content"}
    return _stripped(old) == _stripped(new)


def _stripped(message: Message) -> Message:
    return {k: v.strip() if isinstance(v, str) else v for k, v in message.items()}


def read_reply(message: Message) -> Message:
    """An assistant's message that we have sent, as it reads when it comes back."""
    return read_message(message, 0)


def decoded(
    body: bytes,
    kind: type[B],
    rules: CallRules,
    ignored: Collection[str] = IGNORED,
    neutral: Mapping[str, tuple[Any, ...]] = _NEUTRAL,
) -> B:
    """The request in `body`; fields besides those of `kind` must be `ignored` or `neutral`.

    Raises:
        ApiError: it is none, or asks for what is not served; names the field.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        asked = msgspec.convert(fields, kind)
    except UNREADABLE as error:
        raise ApiError(f"the body is not a valid request: {error}", param=_path(error)) from error
    served = {*kind.__struct_fields__, *ignored}
    for name, value in fields.items():
        if name in served or value is None:
            continue
        if name not in neutral and name not in DRAWING:
            raise ApiError(f"{name} is not supported here: leave it out", param=name)
        values = neutral.get(name) or DRAWING.get(name) or ()
        if value in values:
            continue
        wanted = " or ".join(msgspec.json.encode(v).decode() for v in values)
        given = msgspec.json.encode(value).decode()[:80]
        why = f"{name} is not supported here: leave it out"
        if wanted:
            why = f"{name} = {given} is not supported: use {wanted}"
        if name in neutral and value not in _UNFORCED.get(name, ()):
            raise ApiError(why, param=name)
        rules.settle(name, given, why)
    _agree(asked, rules)
    return asked


def _agree(asked: Body, rules: CallRules) -> None:
    """What is trained on must have been drawn as the run says, so no call may draw otherwise."""
    environment = rules.environment
    for name in ("temperature", "top_p", "top_k", "min_p"):
        given, wanted = getattr(asked, name), getattr(rules.sampling, name)
        if given is not None and given != wanted:
            why = (
                f"{name} = {given:g}, but the run samples with {environment.sampling_key(name)} = "
                f"{wanted:g}: leave it out, or change the run"
            )
            rules.settle(name, given, why)
    for name, given in (asked.chat_template_kwargs or {}).items():
        if name not in rules.template_options or given != rules.template_options[name]:
            why = f"chat_template_kwargs.{name} is not that of the run's model.chat_template_kwargs"
            rules.settle("chat_template_kwargs", f"{name}={given}", why)


def stops_of(given: str | list[str] | None, rules: CallRules) -> tuple[str, ...]:
    """The stop strings of a call, without the tokens that end the model's turns anyway."""
    texts = [given] if isinstance(given, str) else given or []
    if not all(texts):
        raise ApiError("a stop string is empty", param="stop")
    return tuple(text for text in texts if text not in rules.stop_tokens)


def readable(tools: list[dict[str, Any]], rules: CallRules) -> list[dict[str, Any]]:
    """`tools`, if their calls can be read.

    Raises:
        ApiError: nothing here reads the calls that this model writes.
    """
    if tools and not rules.reads_calls:
        raise ApiError(f"{UNREAD}: {REMEDY}", code="tools_unread", param="tools")
    return tools


def leave_out(tool: dict[str, Any], where: str, rules: CallRules) -> None:
    """Count a tool that is no function of the client's; raises ApiError if the run refuses it."""
    why = f"{where} is of type {tool.get('type')!r}: only functions of the client can be called"
    if not rules.override:
        raise ApiError(why, param=where)
    rules.overridden.add("tools", f"one of type {tool.get('type')!r}")


def _max_tokens(asked: _Body) -> int:
    given = [
        limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None
    ]
    return limit_of(min(given, default=None), "max_tokens")


def limit_of(given: int | None, name: str) -> int:
    """The most tokens that a call wants, 0 if it doesn't say."""
    if given is not None and given < 1:
        raise ApiError(f"{name} = {given}: use 1 or more", param=name)
    return given or 0


_KNOWN = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning"}
_CARRIED = {"provider_specific_fields", "annotations"}
"""What client libraries add to the messages that they got, for themselves."""


def read_message(message: dict[str, Any], index: int) -> Message:
    """A message as chat templates take it: text, and arguments of tool calls as objects."""
    where = f"messages[{index}]"
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
    if message.get("tool_calls"):
        clean["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return clean


def read_content(content: Any, where: str) -> str:
    """The text of a message, whole or in parts."""
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
                    "arguments": read_arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    except (TypeError, KeyError, *UNREADABLE) as error:
        raise ApiError(f"{where} is malformed: {error!r}", param=where) from error


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments of a call as an object, which clients send as JSON."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments)
    return msgspec.json.decode(text, type=dict[str, Any])


def _path(error: Exception) -> str | None:
    """The field that an error of msgspec names."""
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None
