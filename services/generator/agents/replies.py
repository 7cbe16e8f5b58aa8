"""Completions in OpenAI's format, whole or as server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from umbra.services.environments.protocol import Message, Turn
from umbra.services.generator.agents.calls import Call
from umbra.services.http import ApiError


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model as an agent gets it; `number` counts the turns of its session from 0."""

    turn: Turn
    number: int
    message: Message
    finish_reason: str


def answer_of(turn: Turn, call: Call, number: int) -> Answer:
    """Return what `turn` says to `call`: text, and calls of tools if the call named some.

    Calls are objects only if all of them are well formed; else they stay text, for the agent to
    answer. The ids of tool calls are the same whenever the turn is played again.
    """
    said = turn.said
    message: Message = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    finish_reason = "stop" if turn.complete else "length"
    if call.tools and said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {
                    "name": called["function"]["name"],
                    "arguments": json.dumps(called["function"]["arguments"]),
                },
            }
            for index, called in enumerate(said.tool_calls)
        ]
        finish_reason = "tool_calls" if turn.complete else "length"
    return Answer(turn, number, message, finish_reason)


class Form(Protocol):
    """The replies to one kind of request."""

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return a reply in one piece."""
        ...

    def events(self, call: Call, answer: Answer) -> bytes:
        """Return a reply as server-sent events."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return a refusal."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """Return a refusal as the event that ends a stream."""
        ...


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all replies of a session share."""

    session: str
    model: str
    created: int  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Completions:
    """The form of chat completions and of plain ones."""

    head: ReplyHead

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": answer.finish_reason, **_said(call, answer)}
        kind = "text_completion" if call.text is not None else "chat.completion"
        fields = {**self._fields(call, answer.number, kind), **_version(answer)}
        return {**fields, "choices": [choice], "usage": usage(answer)}

    def events(self, call: Call, answer: Answer) -> bytes:
        kind = "text_completion" if call.text is not None else "chat.completion.chunk"
        head = {**self._fields(call, answer.number, kind), **_version(answer)}
        if call.stream_usage:
            head["usage"] = None
        first: dict[str, Any] = _said(call, answer)
        last: dict[str, Any] = {"text": ""}
        if call.text is None:
            delta = first.pop("message")
            delta["content"] = delta["content"] or ""
            if "tool_calls" in delta:
                calls = [{"index": i, **tool} for i, tool in enumerate(delta["tool_calls"])]
                delta["tool_calls"] = calls
            first["delta"], last = delta, {"delta": {}}
        ends = {**last, "logprobs": None, "finish_reason": answer.finish_reason}
        chunks = [{"index": 0, "finish_reason": None, **choice} for choice in (first, ends)]
        events = [_data({**head, "choices": [chunk]}) for chunk in chunks]
        if call.stream_usage:
            events.append(_data({**head, "choices": [], "usage": usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def broken(self, error: ApiError) -> bytes:
        return _data(error.body())

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _fields(self, call: Call, number: int, kind: str) -> dict[str, Any]:
        prefix = "cmpl" if call.text is not None else "chatcmpl"
        return {
            "id": f"{prefix}-{self.head.session[:12]}-{number}",
            "object": kind,
            "created": self.head.created,
            "model": self.head.model,
        }


def _version(answer: Answer) -> dict[str, str]:
    return {"system_fingerprint": f"version-{answer.turn.version}"}


def _data(fields: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(fields)


def event(name: str, /, **fields: Any) -> bytes:
    """A server-sent event with a name, which is also its "type"."""
    return b"event: %s\ndata: %s\n\n" % (
        name.encode(),
        msgspec.json.encode({"type": name, **fields}),
    )


def model_list(model: str) -> dict[str, Any]:
    """The answer to `/v1/models`."""
    return {"object": "list", "data": [model_entry(model)]}


def model_entry(model: str) -> dict[str, Any]:
    """The answer to `/v1/models/NAME`."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "umbra"}


def _said(call: Call, answer: Answer) -> dict[str, Any]:
    if call.text is not None:
        return {"text": answer.turn.said.text, "logprobs": _text_logprobs(call, answer.turn)}
    return {"message": dict(answer.message), "logprobs": _chat_logprobs(call, answer.turn)}


def _chat_logprobs(call: Call, turn: Turn) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    return {
        "content": [
            {
                "token": piece,
                "logprob": logprob,
                "bytes": list(piece.encode()),
                "top_logprobs": [],
            }
            for piece, logprob in zip(turn.pieces, turn.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _text_logprobs(call: Call, turn: Turn) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    offsets = [0]
    for piece in turn.pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    return {
        "tokens": turn.pieces,
        "token_logprobs": turn.logprobs,
        "text_offset": offsets,
        "top_logprobs": None,
    }


def usage(answer: Answer) -> dict[str, int]:
    """Tokens of the trajectory so far."""
    prompt, completion = answer.turn.prompt_tokens, len(answer.turn.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
