"""`/v1/messages`: Anthropic's protocol, for agents that are written with its client."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from umbra.services.environments.protocol import Message
from umbra.services.generator.agents.calls import (
    Answer,
    Body,
    Call,
    CallRules,
    Dialect,
    event,
    function_tool,
    read_content,
)
from umbra.services.http import ApiError

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Dialect):
    """Messages, whose contents are blocks."""

    reads: ClassVar = ("messages", "system", "tools")

    @classmethod
    def read(cls, asked: Body, rules: CallRules) -> Call:
        messages: list[Message] = []
        for index, message in enumerate(asked.messages or ()):
            messages += _read(message, f"messages[{index}]")
        if asked.system and messages:
            told = read_content(asked.system, "system")
            messages.insert(0, {"role": "system", "content": told})
        tools: list[dict[str, Any]] = []
        for tool in asked.tools or ():
            name, kind = tool.get("name"), tool.get("type")
            if kind in (None, "custom") and isinstance(name, str):
                schema = tool.get("input_schema") or {}
                tools.append(function_tool(name, tool.get("description"), schema))
            else:  # no function of the client's
                rules.overrule("tools", f"one of type {kind!r}")
        return Call(messages, tools)

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        ends = {"content": _blocks(answer), **_end(answer), "usage": _usage(*answer.tokens)}
        return {**self._message(answer), **ends}

    def events(self, call: Call, answer: Answer) -> bytes:
        events = [event("message_start", message=self._message(answer))]
        for index, block in enumerate(_blocks(answer)):
            begun, delta = _pieces(block)
            events.append(event("content_block_start", index=index, content_block=begun))
            events.append(event("content_block_delta", index=index, delta=delta))
            events.append(event("content_block_stop", index=index))
        usage = _usage(*answer.tokens)
        events.append(event("message_delta", delta=_end(answer), usage=usage))
        return b"".join([*events, event("message_stop")])

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = "overloaded_error" if error.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 404: "not_found_error"}.get(error.status, kind)
        return {"type": "error", "error": {"type": kind, "message": f"{error} ({error.code})"}}

    def broken(self, error: ApiError) -> bytes:
        return event("error", error=self.error(error)["error"])

    def _message(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": f"msg_{self.session[:12]}_{answer.number}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(0, 0),
        }


def _read(message: dict[str, Any], where: str) -> list[Message]:
    """Return a message as those of chat templates; results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user or assistant", param=where)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ApiError(f"{where}.content must be text or blocks", param=f"{where}.content")
    is_said = role == "assistant"
    said: Message = {"role": role, "content": ""}
    words: list[str] = []
    results: list[Message] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                words.append(read_content(block.get("text"), place))
            case "thinking" if is_said:
                said["reasoning_content"] = read_content(block.get("thinking"), place)
            case "redacted_thinking" if is_said:
                pass
            case "tool_use" if is_said and isinstance(block.get("input"), dict):
                function = {"name": str(block.get("name")), "arguments": block["input"]}
                call = {"id": str(block.get("id")), "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            case "tool_result" if not is_said:
                text = read_content(block.get("content"), place)
                text = f"error: {text}" if block.get("is_error") else text
                call_id = str(block.get("tool_use_id"))
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case kind:
                raise ApiError(f"{place} is of type {kind!r}, which is not supported", param=place)
    said["content"] = ("" if is_said else "\n\n").join(words)
    return [*results, said] if words or not results else results


def _end(answer: Answer) -> dict[str, Any]:
    stop = answer.turn.said.stop
    if stop and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOPS[answer.finish_reason], "stop_sequence": None}


def _usage(before: int, new: int) -> dict[str, int]:
    return {"input_tokens": before, "output_tokens": new}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"] or "tool_calls" not in message:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how a block begins in a stream, and its only delta."""
    kind = block["type"]
    if kind == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, delta
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
