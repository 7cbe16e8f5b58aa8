"""`/v1/messages`: Anthropic's protocol, for agents that are written with its client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from umbra.services.environments.protocol import Message
from umbra.services.generator.agents.calls import (
    Body,
    Call,
    CallRules,
    decoded,
    leave_out,
    limit_of,
    read_content,
    readable,
    stops_of,
)
from umbra.services.generator.agents.replies import Answer, ReplyHead, event, usage
from umbra.services.http import ApiError

_IGNORED = ("metadata", "service_tier", "cache_control", "container", "inference_geo")
_NEUTRAL: dict[str, tuple[Any, ...]] = {"tool_choice": ({"type": "auto"},)}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Body(Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


def read_messages(body: bytes, rules: CallRules) -> Call:
    """The call in the body of `/v1/messages`.

    Raises:
        ApiError: it is not one, or not one that this run can serve; names the field.
    """
    asked = decoded(body, _Body, rules, _IGNORED, _NEUTRAL)
    for name in ("thinking", "output_config", "context_management"):
        if (given := getattr(asked, name)) and given != {"type": "disabled"}:
            rules.settle(name, given, f"{name} is not supported here: leave it out")
    messages: list[Message] = []
    if asked.system:
        messages.append({"role": "system", "content": read_content(asked.system, "system")})
    for index, message in enumerate(asked.messages):
        messages += _read(message, f"messages[{index}]")
    if not asked.messages:
        raise ApiError("messages is empty", param="messages")
    return Call(
        messages=messages,
        tools=readable(_tools(asked.tools or [], rules), rules),
        max_tokens=limit_of(asked.max_tokens, "max_tokens"),
        stops=stops_of(asked.stop_sequences, rules),
        stream=bool(asked.stream),
    )


def _tools(given: list[dict[str, Any]], rules: CallRules) -> list[dict[str, Any]]:
    """The tools that the client calls, as chat templates take them; errors as of `leave_out`."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
            leave_out(tool, f"tools[{index}]", rules)
            continue
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
        if tool.get("description"):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _read(message: dict[str, Any], where: str) -> list[Message]:
    """A message as those of chat templates; results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user or assistant", param=where)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ApiError(f"{where}.content must be text or blocks", param=f"{where}.content")
    return _said(blocks, where) if role == "assistant" else _heard(role, blocks, where)


def _said(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    said: Message = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                said["content"] += read_content(block.get("text"), where)
            case "thinking":
                said["reasoning_content"] = read_content(block.get("thinking"), where)
            case "redacted_thinking":
                pass
            case "tool_use" if isinstance(block.get("input"), dict):
                function = {"name": str(block.get("name")), "arguments": block["input"]}
                call = {"id": str(block.get("id")), "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            case kind:
                raise _unsupported(kind, f"{where}.content[{index}]")
    return [said]


def _heard(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    heard: list[Message] = []
    words: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                words.append(read_content(block.get("text"), place))
            case "tool_result":
                text = read_content(block.get("content"), place)
                if block.get("is_error"):
                    text = f"error: {text}"
                call = str(block.get("tool_use_id"))
                heard.append({"role": "tool", "tool_call_id": call, "content": text})
            case kind:
                raise _unsupported(kind, place)
    if words or not heard:
        heard.append({"role": role, "content": "\n\n".join(words)})
    return heard


def _unsupported(kind: Any, where: str) -> ApiError:
    return ApiError(f"{where} is of type {kind!r}, which is not supported", param=where)


@dataclass(frozen=True, slots=True)
class Messages:
    """The form of messages."""

    head: ReplyHead

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        return {
            **self._message(answer.number),
            "content": _blocks(answer),
            **_end(answer),
            "usage": _usage(answer),
        }

    def events(self, call: Call, answer: Answer) -> bytes:
        events = [event("message_start", message=self._message(answer.number))]
        for index, block in enumerate(_blocks(answer)):
            begun, delta = _pieces(block)
            events.append(event("content_block_start", index=index, content_block=begun))
            events.append(event("content_block_delta", index=index, delta=delta))
            events.append(event("content_block_stop", index=index))
        events.append(event("message_delta", delta=_end(answer), usage=_usage(answer)))
        return b"".join([*events, event("message_stop")])

    def broken(self, error: ApiError) -> bytes:
        return event("error", error=_error(error)["error"])

    def error(self, error: ApiError) -> dict[str, Any]:
        return _error(error)

    def _message(self, number: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self.head.session[:12]}_{number}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def _error(error: ApiError) -> dict[str, Any]:
    kind = "overloaded_error" if error.status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 404: "not_found_error"}.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": f"{error} ({error.code})"}}


def _end(answer: Answer) -> dict[str, Any]:
    stop = answer.turn.said.stop
    if stop and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOPS[answer.finish_reason], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    tokens = usage(answer)
    return {"input_tokens": tokens["prompt_tokens"], "output_tokens": tokens["completion_tokens"]}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"] or "tool_calls" not in message:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return blocks


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how a block begins in a stream, and its only delta."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, delta
        case _:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, delta
