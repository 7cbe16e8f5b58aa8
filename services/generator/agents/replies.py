"""Completions in OpenAI's format, whole or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from umbra.services.environments.protocol import Message
from umbra.services.environments.turn_request import Turn
from umbra.services.generator.agents.calls import Call
from umbra.services.http import ApiError

Pieces = Sequence[tuple[str, str]]  # ("content" or "reasoning", text)


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model as an agent gets it; `number` counts the turns of its session from 0."""

    turn: Turn
    number: int
    message: Message
    finish_reason: str


def answer_of(turn: Turn, call: Call, number: int) -> Answer:
    """What `turn` says to `call`: text, and calls of tools if the call named some.

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


class Stream(Protocol):
    """One reply as server-sent events."""

    def pieces(self, pieces: Pieces) -> bytes:
        """The model goes on."""
        ...

    def end(self, answer: Answer) -> bytes:
        """It has ended its turn: what is not said yet, and the end."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """There is no end."""
        ...


class Form(Protocol):
    """How replies of one kind of request look."""

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        """A reply in one piece."""
        ...

    def stream(self, call: Call, number: int) -> Stream:
        """A reply as events; `number` is that of the turn in its session."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """A refusal."""
        ...


def rest(whole: str | None, said: str) -> str:
    """What of `whole` is not `said` yet; nothing if it goes on in another way."""
    whole = whole or ""
    return whole[len(said) :] if whole.startswith(said) else ""


def unsaid(answer: Answer, said: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a stream has still to say of an answer's words, by kind; `said` is what it has said."""
    message = answer.message
    wholes = (("reasoning", message.get("reasoning_content")), ("content", message["content"]))
    return [(kind, more) for kind, whole in wholes if (more := rest(whole, said[kind]))]


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

    def stream(self, call: Call, number: int) -> Stream:
        kind = "text_completion" if call.text is not None else "chat.completion.chunk"
        return _Chunks(call, self._fields(call, number, kind))

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


@dataclass(slots=True)
class _Chunks:
    call: Call
    head: dict[str, Any]
    said: dict[str, str] = field(default_factory=lambda: {"content": "", "reasoning": ""})
    begun: bool = False

    def pieces(self, pieces: Pieces) -> bytes:
        events: list[bytes] = []
        for kind, text in pieces:
            self.said[kind] += text
            if self.call.text is not None:
                events.append(self._event({"text": text, "logprobs": None}))
            else:
                name = "content" if kind == "content" else "reasoning_content"
                events.append(self._delta({name: text}))
        return b"".join(events)

    def end(self, answer: Answer) -> bytes:
        self.head = {**self.head, **_version(answer)}  # which was not known before
        logprobs = _said(self.call, answer)["logprobs"]
        if self.call.text is not None:
            text = rest(answer.turn.said.text, self.said["content"])
            last: dict[str, Any] = {"text": ""}
            events = [self._event({"text": text, "logprobs": logprobs})]
        else:
            message = answer.message
            delta: dict[str, Any] = {"content": rest(message["content"], self.said["content"])}
            if more := rest(message.get("reasoning_content"), self.said["reasoning"]):
                delta["reasoning_content"] = more
            if "tool_calls" in message:
                calls = [{"index": i, **tool} for i, tool in enumerate(message["tool_calls"])]
                delta["tool_calls"] = calls
            last = {"delta": {}}
            events = [self._delta(delta, logprobs)]
        events.append(self._event({**last, "logprobs": None}, answer.finish_reason))
        if self.call.stream_usage:
            events.append(_data({**self.head, "choices": [], "usage": usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def broken(self, error: ApiError) -> bytes:
        return _data(error.body())

    def _delta(self, delta: dict[str, Any], logprobs: Any = None) -> bytes:
        role = {} if self.begun else {"role": "assistant"}
        self.begun = True
        return self._event({"delta": {**role, **delta}, "logprobs": logprobs})

    def _event(self, choice: dict[str, Any], finish_reason: str | None = None) -> bytes:
        whole = {"index": 0, "finish_reason": finish_reason, **choice}
        nothing = {"usage": None} if self.call.stream_usage else {}
        return _data({**self.head, "choices": [whole], **nothing})


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


def usage(answer: Answer) -> dict[str, int]:
    """Tokens of the trajectory so far."""
    prompt, completion = answer.turn.prompt_tokens, len(answer.turn.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
