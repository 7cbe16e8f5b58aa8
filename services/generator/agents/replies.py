"""Completions in OpenAI's format, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.services.environments.protocol import Message
from umbra.services.environments.tools import ToolCall, parse_tool_calls
from umbra.services.environments.turn_request import Turn
from umbra.services.generator.agents.calls import Call

_CALL = "<tool_call>"


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model as an agent gets it; `number` counts the turns of its session from 0."""

    turn: Turn
    number: int
    message: Message
    finish_reason: str


def answer_of(turn: Turn, call: Call, number: int) -> Answer:
    """What `turn` says to `call`: text, or calls of tools if the call named some.

    Calls are objects only if all of them are well formed; else they stay text, for the agent to
    answer. The ids of tool calls are the same whenever the turn is played again.
    """
    message: Message = {"role": "assistant", "content": turn.text}
    calls = parse_tool_calls(turn.text) if call.tools else []
    found = [c for c in calls if isinstance(c, ToolCall)]
    finish_reason = "stop" if turn.complete else "length"
    if found and len(found) == len(calls):
        message["content"] = turn.text.partition(_CALL)[0].strip() or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for index, c in enumerate(found)
        ]
        finish_reason = "tool_calls" if turn.complete else "length"
    return Answer(turn, number, message, finish_reason)


@dataclass(frozen=True, slots=True)
class Form:
    """What all replies of a session share."""

    session: str
    model: str
    created: int  # seconds since the epoch

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": answer.finish_reason, **_said(call, answer)}
        kind = "text_completion" if call.text is not None else "chat.completion"
        return {**self._head(call, answer, kind), "choices": [choice], "usage": _usage(answer)}

    def events(self, call: Call, answer: Answer) -> bytes:
        """The same as server-sent events: one piece, since a turn comes from the engine whole."""
        return b"".join(b"data: %s\n\n" % event for event in self._events(call, answer))

    def _events(self, call: Call, answer: Answer) -> Iterator[bytes]:
        said = _said(call, answer)
        if call.text is None:
            delta = {**said.pop("message")}
            if "tool_calls" in delta:
                delta["tool_calls"] = [
                    {"index": i, **tool} for i, tool in enumerate(delta["tool_calls"])
                ]
            said["delta"] = delta
        last = {"text": ""} if call.text is not None else {"delta": {}}
        kind = "text_completion" if call.text is not None else "chat.completion.chunk"
        head = self._head(call, answer, kind)
        for choice in (
            {"index": 0, "finish_reason": None, **said},
            {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None, **last},
        ):
            usage = {"usage": None} if call.stream_usage else {}
            yield msgspec.json.encode({**head, "choices": [choice], **usage})
        if call.stream_usage:
            yield msgspec.json.encode({**head, "choices": [], "usage": _usage(answer)})
        yield b"[DONE]"

    def _head(self, call: Call, answer: Answer, kind: str) -> dict[str, Any]:
        prefix = "cmpl" if call.text is not None else "chatcmpl"
        return {
            "id": f"{prefix}-{self.session[:12]}-{answer.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"version-{answer.turn.version}",
        }


def model_list(model: str) -> dict[str, Any]:
    """The answer to `/v1/models`."""
    return {"object": "list", "data": [model_entry(model)]}


def model_entry(model: str) -> dict[str, Any]:
    """The answer to `/v1/models/NAME`."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "umbra"}


def _said(call: Call, answer: Answer) -> dict[str, Any]:
    if call.text is not None:
        return {"text": answer.turn.text, "logprobs": _text_logprobs(call, answer.turn)}
    return {"message": answer.message, "logprobs": _chat_logprobs(call, answer.turn)}


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


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.turn.prompt_tokens, len(answer.turn.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
