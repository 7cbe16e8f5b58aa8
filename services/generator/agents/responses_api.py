"""`/v1/responses`: OpenAI's newer protocol, spoken by its agents and by coding agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.services.environments.protocol import Message
from umbra.services.generator.agents.calls import (
    IGNORED,
    Body,
    Call,
    CallRules,
    decoded,
    leave_out,
    limit_of,
    read_arguments,
    read_content,
    read_message,
    readable,
)
from umbra.services.generator.agents.replies import Answer, ReplyHead, event, usage
from umbra.services.http import ApiError

_IGNORED = (
    *IGNORED,
    "include",
    "truncation",
    "stream_options",
    "client_metadata",
    "max_tool_calls",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto",),
    "background": (False,),
    "top_logprobs": (0,),
}


class _Body(Body, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None


def read_responses(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/responses`.

    Raises:
        ApiError: it is not one, or not one that this run can serve; names the field.
    """
    asked = decoded(body, _Body, rules, _IGNORED, _NEUTRAL)
    _settle(asked, rules)
    messages: list[Message] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += _messages(asked.input)
    if not messages:
        raise ApiError("input is empty", param="input")
    tools, namespaces = _tools(asked.tools or [], rules)
    return Call(
        messages=_instructed(messages),
        tools=readable(tools, rules),
        namespaces=namespaces,
        max_tokens=limit_of(asked.max_output_tokens, "max_output_tokens"),
        stream=bool(asked.stream),
        follows=asked.previous_response_id or "",
    )


def _settle(asked: _Body, rules: CallRules) -> None:
    for name, value in (asked.reasoning or {}).items():
        if value is not None:
            field_name = f"reasoning.{name}"
            rules.settle(field_name, value, f"{field_name} is not supported here: leave it out")
    for name, value in (asked.text or {}).items():
        if name == "format" and (value or {}).get("type", "text") != "text":
            raise ApiError("text.format must be text", param="text.format")
        if name != "format" and value is not None:
            rules.settle(f"text.{name}", value, f"text.{name} is not supported: leave it out")


def _tools(
    given: list[dict[str, Any]], rules: CallRules
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The functions as chat templates take them, and those of namespaces by the names given here.

    Raises:
        ApiError: a tool is none that the client calls, and no such tool may be left out.
    """
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for index, tool in enumerate(given):
        space = str(tool.get("name")) if tool.get("type") == "namespace" else ""
        for each in (tool.get("tools") or []) if space else [tool]:
            if each.get("type") != "function" or not isinstance(each.get("name"), str):
                leave_out(each, f"tools[{index}]", rules)
                continue
            name = _full_name(space, each["name"])
            if space:
                namespaces[name] = (space, each["name"])
            more = {key: each[key] for key in ("description", "parameters") if each.get(key)}
            tools.append({"type": "function", "function": {"name": name, **more}})
    return tools, namespaces


def _full_name(space: Any, name: str) -> str:
    """What the model calls a tool of a namespace: chat templates have none."""
    return f"{space}__{name}" if space else name


def _instructed(messages: list[Message]) -> list[Message]:
    """`messages` with those of the system that begin it as one: many templates take no more."""
    others = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if others < 2:
        return messages
    told = "\n\n".join(message["content"] for message in messages[:others])
    return [{"role": "system", "content": told}, *messages[others:]]


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """The items of an input as messages: what the model said in one turn is one message."""
    messages: list[Message] = []
    said: Message | None = None  # the model's turn that goes on
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        is_said = kind in ("function_call", "reasoning") or item.get("role") == "assistant"
        if is_said and said is None:
            said = {"role": "assistant", "content": ""}
            messages.append(said)
        if not is_said:
            said = None
            messages.append(_heard(item, kind, where, index))
            continue
        assert said is not None
        if kind == "function_call":
            said.setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "reasoning":
            text = _thought(item, where)
            if text:
                said["reasoning_content"] = text
        else:
            said["content"] += read_content(item.get("content"), f"{where}.content")
    return messages


def _heard(item: dict[str, Any], kind: str, where: str, index: int) -> Message:
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": str(item.get("call_id")),
            "content": read_content(item.get("output"), f"{where}.output"),
        }
    if kind != "message":
        raise ApiError(f"{where} is of type {kind!r}, which is not supported", param=where)
    fields = {name: item[name] for name in ("role", "content") if name in item}
    return read_message(fields, index)


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        arguments = read_arguments(item["arguments"])
        name = _full_name(item.get("namespace"), str(item["name"]))
        function = {"name": name, "arguments": arguments}
        return {"id": str(item["call_id"]), "type": "function", "function": function}
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ApiError(f"{where} is malformed: {error!r}", param=where) from error


def _thought(item: dict[str, Any], where: str) -> str:
    """The reasoning that we have sent; what others sent is encrypted, or left out."""
    return read_content(item.get("content"), f"{where}.content") if item.get("content") else ""


@dataclass(frozen=True, slots=True)
class Responses:
    """The form of responses."""

    head: ReplyHead

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        name = response_id(self.head.session, answer.number)
        fields = self._response(call, name)
        return _ended(fields, answer, _items(name, call, answer))

    def events(self, call: Call, answer: Answer) -> bytes:
        name = response_id(self.head.session, answer.number)
        begun, items = self._response(call, name), _items(name, call, answer)
        told: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for at, item in enumerate(items):
            told += _item_events(at, item)
        kind = "incomplete" if answer.finish_reason == "length" else "completed"
        told.append((f"response.{kind}", {"response": _ended(begun, answer, items)}))
        events = (event(kind, sequence_number=n, **more) for n, (kind, more) in enumerate(told))
        return b"".join(events)

    def broken(self, error: ApiError) -> bytes:
        said = {"code": error.code, "message": str(error), "param": error.param}
        return event("error", sequence_number=0, **said)

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _response(self, call: Call, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [{"type": "function", **tool["function"]} for tool in call.tools],
            "previous_response_id": call.follows or None,
        }


def response_id(session: str, number: int) -> str:
    """The id of the response that is turn `number` of a session."""
    return f"resp_{session[:12]}_{number}"


def _ended(fields: dict[str, Any], answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    tokens = usage(answer)
    return {
        **fields,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "metadata": {"version": str(answer.turn.version)},
        "usage": {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens["total_tokens"],
        },
    }


def _items(name: str, call: Call, answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        items.append(_item("reasoning", name, thought))
    if message["content"] or "tool_calls" not in message:
        items.append(_item("content", name, message["content"] or ""))
    items += [
        {
            "type": "function_call",
            "id": f"fc_{name}_{index}",
            "call_id": made["id"],
            **_called(call, made["function"]["name"]),
            "arguments": made["function"]["arguments"],
            "status": "completed",
        }
        for index, made in enumerate(message.get("tool_calls", ()))
    ]
    return items


def _called(call: Call, name: str) -> dict[str, str]:
    """The name of a tool, as the client that makes `call` has it."""
    space, own = call.namespaces.get(name, ("", name))
    return {"name": own, "namespace": space} if space else {"name": own}


def _item(kind: str, name: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}]
        said = {"type": "reasoning", "id": f"rs_{name}", "summary": []}
    else:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        said = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
    return {**said, "content": content, "status": "completed"}


def _item_events(at: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that tell of an item: its begin, its text or arguments, its end."""
    where = {"output_index": at, "item_id": item["id"]}
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        begun["arguments"] = ""
        kind, given = "response.function_call_arguments", item["arguments"]
        between = [
            (f"{kind}.delta", {"delta": given, **where}),
            (f"{kind}.done", {"arguments": given, "name": item["name"], **where}),
        ]
    else:
        begun["content"] = []
        (part,) = item["content"]
        kind, text, where = f"response.{part['type']}", part["text"], {**where, "content_index": 0}
        more = {"logprobs": []} if part["type"] == "output_text" else {}
        between = [
            ("response.content_part.added", {"part": {**part, "text": ""}, **where}),
            (f"{kind}.delta", {"delta": text, **more, **where}),
            (f"{kind}.done", {"text": text, **more, **where}),
            ("response.content_part.done", {"part": part, **where}),
        ]
    return [
        ("response.output_item.added", {"output_index": at, "item": begun}),
        *between,
        ("response.output_item.done", {"output_index": at, "item": item}),
    ]
