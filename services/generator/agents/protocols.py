"""The protocols of agents' clients: OpenAI's older and newer one, and Anthropic's."""

from __future__ import annotations

import json
from itertools import chain, takewhile
from typing import Any, ClassVar

import msgspec

from umbra.services.environments.protocol import Message, tool_call, tool_schema
from umbra.services.generator.agents.calls import (
    AgentProtocol,
    Answer,
    Body,
    Call,
    CallRules,
    checked_tool,
    event,
    read_call,
    read_content,
    read_message,
    response_id,
)
from umbra.services.http import ApiError

# -- /v1/chat/completions -------------------------------------------------------------------------


class Completions(AgentProtocol):
    reads: ClassVar = ("messages", "tools", "logprobs")

    @classmethod
    def read(cls, request: Body, rules: CallRules) -> Call:
        tools = [checked_tool(tool) for tool in request.tools or ()]
        each = enumerate(request.messages or ())
        messages = [read_message(message, f"messages[{i}]") for i, message in each]
        return Call(messages, tools, logprobs=bool(request.logprobs))

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": answer.finish_reason, **_choice(call, answer)}
        head = self._head(answer, "chat.completion")
        return {**head, "choices": [choice], "usage": _openai_usage(answer)}

    def events(self, call: Call, answer: Answer) -> bytes:
        head = self._head(answer, "chat.completion.chunk")
        if call.stream_usage:
            head["usage"] = None
        first = {"index": 0, "finish_reason": None, **_choice(call, answer)}
        delta = first["delta"] = first.pop("message")
        delta["content"] = delta["content"] or ""
        for index, made in enumerate(delta.get("tool_calls", ())):
            made["index"] = index
        last = {"index": 0, "finish_reason": answer.finish_reason, "delta": {}, "logprobs": None}
        events = [_data({**head, "choices": [choice]}) for choice in (first, last)]
        if call.stream_usage:
            events.append(_data({**head, "choices": [], "usage": _openai_usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def broken(self, error: ApiError) -> bytes:
        return _data(error.body())

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.session[:12]}-{answer.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"version-{answer.turn.version}",
        }


def _data(fields: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(fields)


def _openai_usage(answer: Answer) -> dict[str, int]:
    before, new = answer.tokens
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


def _choice(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the part of a choice that the model said."""
    turn, logprobs = answer.turn, None
    message = dict(answer.message)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [{**call, "function": _written(call)} for call in calls]
    if call.logprobs:
        content = [
            {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, value in zip(turn.pieces, turn.logprobs, strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    return {"message": message, "logprobs": logprobs}


def _written(call: dict[str, Any]) -> dict[str, str]:
    """Return name and arguments of a tool call, these as JSON."""
    function = call["function"]
    return {"name": function["name"], "arguments": json.dumps(function["arguments"])}


# -- /v1/responses --------------------------------------------------------------------------------


class Responses(AgentProtocol):
    """Responses, which are lists of items."""

    reads: ClassVar = ("input", "instructions", "tools", "previous_response_id")

    @classmethod
    def read(cls, request: Body, rules: CallRules) -> Call:
        messages: list[Message] = []
        if request.instructions:
            messages.append({"role": "system", "content": request.instructions})
        said = request.input or []
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages += _read_items(items)
        # The system's messages that begin a conversation become one: many templates take no more.
        first = [m["content"] for m in takewhile(lambda m: m["role"] == "system", messages)]
        if first:
            messages[: len(first)] = [{"role": "system", "content": "\n\n".join(first)}]
        call = Call(messages, follows=request.previous_response_id or "")
        for tool in request.tools or ():
            space = str(tool.get("name")) if tool.get("type") == "namespace" else ""
            inner = (tool.get("tools") or []) if space else [tool]
            if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
                raise ApiError("tools of a namespace must be objects", param="tools")
            for each in inner:
                name = f"{space}__{each.get('name')}"
                if space:  # chat templates have none
                    call.namespaces[name] = (space, str(each.get("name")))
                    each = {**each, "name": each.get("name") and name}
                call.tools.extend(_tools(each, ("function",), "parameters", rules))
        return call

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        name = response_id(self.session, answer.number)
        return _ended(self._response(call, name), answer, _items(name, call, answer))

    def events(self, call: Call, answer: Answer) -> bytes:
        name = response_id(self.session, answer.number)
        response, items = self._response(call, name), _items(name, call, answer)
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
        ]
        for at, item in enumerate(items):
            events += _item_events(at, item)
        ended = _ended(response, answer, items)
        events.append((f"response.{ended['status']}", {"response": ended}))
        return b"".join(event(kind, sequence_number=n, **f) for n, (kind, f) in enumerate(events))

    def broken(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": str(error), "param": error.param}
        return event("error", sequence_number=0, **fields)

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


def _read_items(items: list[dict[str, Any]]) -> list[Message]:
    """Return the items of an input as messages: a turn of the model is one message."""
    messages: list[Message] = []
    turn: Message | None = None  # the model's turn that goes on
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind not in ("function_call", "reasoning") and item.get("role") != "assistant":
            turn = None
            if kind == "function_call_output":
                text = read_content(item.get("output"), f"{where}.output")
                call_id = str(item.get("call_id"))
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            elif kind == "message":
                own = {name: item[name] for name in ("role", "content") if name in item}
                messages.append(read_message(own, where))
            else:
                raise _unsupported(where, kind)
            continue
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if kind == "function_call":
            space = item.get("namespace")
            function = {**item, "name": f"{space}__{item.get('name')}"} if space else item
            call = read_call(item, "call_id", function, where)
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "reasoning":
            turn["content"] += read_content(item.get("content"), f"{where}.content")
        elif item.get("content"):  # ours; other servers encrypt it, or leave it out
            turn["reasoning_content"] = read_content(item["content"], f"{where}.content")
    return messages


def _tools(
    tool: dict[str, Any], kinds: tuple[str | None, ...], parameters: str, rules: CallRules
) -> list[dict[str, Any]]:
    """Return a function of the client's as chat templates take it; none for other tools."""
    name, kind = tool.get("name"), tool.get("type")
    if kind in kinds and isinstance(name, str):
        schema = tool_schema(name, tool.get("description"), tool.get(parameters) or None)
        return [checked_tool(schema)]
    rules.overrule("tools", f"one of type {kind!r}")
    return []


def _unsupported(where: str, kind: Any) -> ApiError:
    return ApiError(f"{where} is of type {kind!r}, which is not supported", param=where)


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
    if (text := message["content"]) or "tool_calls" not in message:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        items.append({**head, "content": [part]})
    for index, made in enumerate(message.get("tool_calls", ())):
        head = {"type": "function_call", "id": f"fc_{name}_{index}", "call_id": made["id"]}
        called = _written(made)
        if named := call.namespaces.get(called["name"]):
            called |= {"name": named[1], "namespace": named[0]}
        items.append({**head, **called})
    return [{**item, "status": "completed"} for item in items]


def _item_events(at: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that tell of an item: its begin, its text or arguments, its end."""
    where = {"output_index": at, "item_id": item["id"]}
    started = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
        kind, arguments = "response.function_call_arguments", item["arguments"]
        between = [
            (f"{kind}.delta", {"delta": arguments, **where}),
            (f"{kind}.done", {"arguments": arguments, "name": item["name"], **where}),
        ]
    else:
        started["content"] = []
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
        ("response.output_item.added", {"output_index": at, "item": started}),
        *between,
        ("response.output_item.done", {"output_index": at, "item": item}),
    ]


# -- /v1/messages ---------------------------------------------------------------------------------

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(AgentProtocol):
    """Anthropic's messages, whose contents are blocks."""

    reads: ClassVar = ("messages", "system", "tools")

    @classmethod
    def read(cls, request: Body, rules: CallRules) -> Call:
        messages: list[Message] = []
        for index, message in enumerate(request.messages or ()):
            messages += _read_blocks(message, f"messages[{index}]")
        if request.system and messages:
            content = read_content(request.system, "system")
            messages.insert(0, {"role": "system", "content": content})
        kinds = (None, "custom")
        tools = [_tools(tool, kinds, "input_schema", rules) for tool in request.tools or ()]
        return Call(messages, list(chain(*tools)))

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        ends = {"content": _blocks(answer), **_end(answer), "usage": _usage(*answer.tokens)}
        return {**self._message(answer), **ends}

    def events(self, call: Call, answer: Answer) -> bytes:
        events = [event("message_start", message=self._message(answer))]
        for index, block in enumerate(_blocks(answer)):
            kind = block["type"]
            if kind == "tool_use":
                started = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            else:
                started = {**block, kind: ""}
                delta = {"type": f"{kind}_delta", kind: block[kind]}
            events.append(event("content_block_start", index=index, content_block=started))
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


def _read_blocks(message: dict[str, Any], where: str) -> list[Message]:
    """Return messages as chat templates take them; each result of a tool becomes one of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user or assistant", param=where)
    blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ApiError(f"{where}.content must be text or blocks", param=f"{where}.content")
    is_said = role == "assistant"
    own: Message = {"role": role, "content": ""}
    words: list[str] = []
    results: list[Message] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.get("type"):
            case "text":
                words.append(read_content(block.get("text"), place))
            case "thinking" if is_said:
                own["reasoning_content"] = read_content(block.get("thinking"), place)
            case "redacted_thinking" if is_said:
                pass
            case "tool_use" if is_said and isinstance(block.get("input"), dict):
                call = tool_call(str(block.get("name")), block["input"], str(block.get("id")))
                own.setdefault("tool_calls", []).append(call)
            case "tool_result" if not is_said:
                text = read_content(block.get("content"), place)
                text = f"error: {text}" if block.get("is_error") else text
                call_id = str(block.get("tool_use_id"))
                results.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case kind:
                raise _unsupported(place, kind)
    own["content"] = ("" if is_said else "\n\n").join(words)
    return [*results, own] if words or not results else results


def _end(answer: Answer) -> dict[str, Any]:
    stop = answer.turn.parsed.stop
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
    if (text := message["content"]) or "tool_calls" not in message:
        blocks.append({"type": "text", "text": text})
    for made in message.get("tool_calls", ()):
        called = made["function"]
        use = {"type": "tool_use", "id": made["id"], "name": called["name"]}
        blocks.append({**use, "input": called["arguments"]})
    return blocks
