"""`/v1/chat/completions` and `/v1/completions`: OpenAI's older protocol."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from umbra.services.generator.agents.calls import (
    Answer,
    Body,
    Call,
    CallRules,
    Dialect,
    read_message,
)
from umbra.services.http import ApiError


class Completions(Dialect):
    """Chat completions, and the base of plain ones."""

    reads: ClassVar = ("messages", "tools", "logprobs")

    @classmethod
    def read(cls, asked: Body, rules: CallRules) -> Call:
        tools = asked.tools or []
        if not all(isinstance(tool.get("function"), dict) for tool in tools):
            raise ApiError('every entry of tools needs "function"', param="tools")
        messages = [read_message(one, i) for i, one in enumerate(asked.messages or ())]
        return Call(messages, tools, logprobs=bool(asked.logprobs))

    def whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        kind = "text_completion" if call.text is not None else "chat.completion"
        choice = {"index": 0, "finish_reason": answer.finish_reason, **_said(call, answer)}
        return {**self._head(call, answer, kind), "choices": [choice], "usage": _usage(answer)}

    def events(self, call: Call, answer: Answer) -> bytes:
        kind = "text_completion" if call.text is not None else "chat.completion.chunk"
        head = self._head(call, answer, kind)
        if call.stream_usage:
            head["usage"] = None
        first = _said(call, answer)
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
            events.append(_data({**head, "choices": [], "usage": _usage(answer)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def broken(self, error: ApiError) -> bytes:
        return _data(error.body())

    def _head(self, call: Call, answer: Answer, kind: str) -> dict[str, Any]:
        prefix = "cmpl" if call.text is not None else "chatcmpl"
        return {
            "id": f"{prefix}-{self.session[:12]}-{answer.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"version-{answer.turn.version}",
        }


class TextCompletions(Completions):
    """Plain completions."""

    reads: ClassVar = ("prompt", "logprobs")

    @classmethod
    def read(cls, asked: Body, rules: CallRules) -> Call:
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt or []
        if len(prompts) != 1:
            raise ApiError(f"prompt has {len(prompts)} texts: a session is one", param="prompt")
        if asked.logprobs:
            raise ApiError(
                f"logprobs = {asked.logprobs} asks for other tokens than the sampled ones: use 0",
                param="logprobs",
            )
        return Call(text=prompts[0], logprobs=asked.logprobs is not None)


def _data(fields: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(fields)


def _usage(answer: Answer) -> dict[str, int]:
    before, new = answer.tokens
    return {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}


def _said(call: Call, answer: Answer) -> dict[str, Any]:
    """Return the part of a choice that the model said."""
    turn = answer.turn
    logprobs: dict[str, Any] | None = None
    if call.text is None:
        if call.logprobs:
            content = [
                {"token": one, "logprob": value, "bytes": list(one.encode()), "top_logprobs": []}
                for one, value in zip(turn.pieces, turn.logprobs, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        return {"message": dict(answer.message), "logprobs": logprobs}
    if call.logprobs:
        logprobs = {
            "tokens": turn.pieces,
            "token_logprobs": turn.logprobs,
            "text_offset": list(accumulate(map(len, turn.pieces[:-1]), initial=0)),
            "top_logprobs": None,
        }
    return {"text": turn.said.text, "logprobs": logprobs}
