"""`/v1/responses`: OpenAI's newer protocol, spoken by its agents and by coding agents."""

from __future__ import annotations

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
    read_call,
    read_content,
    read_message,
)
from umbra.services.http import ApiError


class Responses(Dialect):
    """Responses, which are lists of items."""

    reads: ClassVar = ("input", "instructions", "tools", "previous_response_id")

    @classmethod
    def read(cls, asked: Body, rules: CallRules) -> Call:
        messages: list[Message] = []
        if asked.instructions:
            messages.append({"role": "system", "content": asked.instructions})
        if isinstance(asked.input, str):
            messages.append({"role": "user", "content": asked.input})
        else:
            messages += _messages(asked.input or [])
        call = Call(_instructed(messages), follows=asked.previous_response_id or "")
        for tool in asked.tools or ():
            space = str(tool.get("name")) if tool.get("type") == "namespace" else ""
            for each in (tool.get("tools") or []) if space else [tool]:
                if each.get("type") != "function" or not isinstance(each.get("name"), str):
                    rules.overrule("tools", f"one of type {each.get('type')!r}")
                    continue
                name = f"{space}__{each['name']}" if space else each["name"]
                if space:  # chat templates have none
                    call.namespaces[name] = (space, each["name"])
                given = each.get("parameters") or None
                call.tools.append(function_tool(name, each.get("description"), given))
        return call

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        name = response_id(self.session, answer.number)
        return _ended(self._response(call, name), answer, _items(name, call, answer))

    def events(self, call: Call, answer: Answer) -> bytes:
        name = response_id(self.session, answer.number)
        begun, items = self._response(call, name), _items(name, call, answer)
        told: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for at, item in enumerate(items):
            told += _item_events(at, item)
        ended = _ended(begun, answer, items)
        told.append((f"response.{ended['status']}", {"response": ended}))
        events = (event(kind, sequence_number=n, **more) for n, (kind, more) in enumerate(told))
        return b"".join(events)

    def broken(self, error: ApiError) -> bytes:
        said = {"code": error.code, "message": str(error), "param": error.param}
        return event("error", sequence_number=0, **said)

    def _response(self, call: Call, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
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
    """Return the id of the response that is turn `number` of a session."""
    return f"resp_{session[:12]}_{number}"


def _instructed(messages: list[Message]) -> list[Message]:
    """Join the system's messages that begin a conversation: many templates take no more."""
    others = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if others < 2:
        return messages
    told = "\n\n".join(message["content"] for message in messages[:others])
    return [{"role": "system", "content": told}, *messages[others:]]


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """Return the items of an input as messages: a turn of the model is one message."""
    messages: list[Message] = []
    said: Message | None = None  # the model's turn that goes on
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind not in ("function_call", "reasoning") and item.get("role") != "assistant":
            said = None
            messages.append(_heard(item, kind, where, index))
            continue
        if said is None:
            said = {"role": "assistant", "content": ""}
            messages.append(said)
        if kind == "function_call":
            space = item.get("namespace")
            function = {**item, "name": f"{space}__{item.get('name')}"} if space else item
            call = read_call(item, "call_id", function, where)
            said.setdefault("tool_calls", []).append(call)
        elif kind != "reasoning":
            said["content"] += read_content(item.get("content"), f"{where}.content")
        elif item.get("content"):  # ours; that of others is encrypted, or left out
            said["reasoning_content"] = read_content(item["content"], f"{where}.content")
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
    return read_message({name: item[name] for name in ("role", "content") if name in item}, index)


def _ended(fields: dict[str, Any], answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    before, new = answer.tokens
    return {
        **fields,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "metadata": {"version": str(answer.turn.version)},
        "usage": {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": before + new,
        },
    }


def _items(name: str, call: Call, answer: Answer) -> list[dict[str, Any]]:
    """Return the items of the response `name`; tools have the names that the client gave them."""
    message = answer.message
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if message["content"] or "tool_calls" not in message:
        text = message["content"] or ""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        items.append({**head, "content": [part]})
    for index, made in enumerate(message.get("tool_calls", ())):
        space, own = call.namespaces.get(made["function"]["name"], ("", made["function"]["name"]))
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{index}",
                "call_id": made["id"],
                "name": own,
                **({"namespace": space} if space else {}),
                "arguments": made["function"]["arguments"],
            }
        )
    return [{**item, "status": "completed"} for item in items]


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
