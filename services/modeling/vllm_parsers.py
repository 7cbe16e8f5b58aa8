"""vLLM's parsers of tool calls and reasoning, where vLLM is installed. They read whole turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from umbra.services.environments.protocol import Said
from umbra.services.modeling.parsers import Piece, Reading, Tools

PREFIX = "vllm/"


def is_installed() -> bool:
    return find_spec("vllm") is not None


class VllmParser:
    """A parser of tool calls of vLLM's, and one of reasoning.

    Args:
        tokenizer: the model's.
        calls: the name of the parser of tool calls.
        reasoning: that of the parser of reasoning; "" = none.

    Raises:
        KeyError: vLLM has no such parser.
        Exception: whatever vLLM says of a tokenizer that this parser is not for.
    """

    calls = True
    marked = True

    def __init__(self, tokenizer: Any, calls: str, reasoning: str = "") -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self.name = f"{PREFIX}{calls}" + (f"+{reasoning}" if reasoning else "")
        self._tokenizer = tokenizer
        self._call_parser = ToolParserManager.get_tool_parser(calls)
        self._reasoning = (
            ReasoningParserManager.get_reasoning_parser(reasoning) if reasoning else None
        )
        self.begin("", []).end()  # some refuse tokenizers

    def begin(self, prompt: str, tools: Tools) -> Reading:
        return _VllmReading(self._tokenizer, self._call_parser, self._reasoning, prompt, tools)


class _VllmReading:
    def __init__(
        self, tokenizer: Any, calls: Any, reasoning: Any, prompt: str, tools: Tools
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        user: Any = {"role": "user", "content": ""}
        fields: dict[str, Any] = {"messages": [user], "tools": list(tools) or None}
        self._request = ChatCompletionRequest(**fields)
        self._tokenizer = tokenizer
        self._calls = calls(tokenizer, self._request.tools) if tools else None
        self._reasoning = reasoning(tokenizer) if reasoning is not None else None
        if self._reasoning is not None:
            self._reasoning.adjust_initial_state_from_prompt(self._ids(prompt))
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []  # whether it is a call is known in the end

    def end(self, stop: str = "") -> Said:
        del stop
        reasoning, content = "", self._text
        if self._reasoning is not None:
            found, rest = self._reasoning.extract_reasoning(self._text, self._request)
            reasoning, content = found or "", rest or ""
        calls: list[dict[str, Any]] = []
        problem = ""
        if self._calls is not None and content:
            found = self._calls.extract_tool_calls(content, self._request)
            try:
                calls = list(_calls(found.tool_calls))
            except (TypeError, ValueError) as error:
                problem = f"the tool call cannot be read: its arguments must be an object: {error}"
            else:
                content = (found.content or "").strip() if calls else content
        return Said(
            text=self._text,
            content=content,
            reasoning=reasoning.strip(),
            tool_calls=calls,
            problem=problem,
            read=True,
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _calls(found: Any) -> Iterator[dict[str, Any]]:
    for call in found:
        arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise TypeError(f"{call.function.arguments!r}")
        yield {
            "type": "function",
            "function": {"name": str(call.function.name), "arguments": arguments},
        }
