"""vLLM's parsers of tool calls and reasoning, where vLLM is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from umbra.services.environments.protocol import Said
from umbra.services.modeling.parsers import Tools

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
        self._calls = ToolParserManager.get_tool_parser(calls)
        self._reasoning = (
            ReasoningParserManager.get_reasoning_parser(reasoning) if reasoning else None
        )
        self.read("", "", [])  # some refuse tokenizers

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> Said:
        """Read the turn; see `Parser`."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        del stop
        user: Any = {"role": "user", "content": ""}
        fields: dict[str, Any] = {"messages": [user], "tools": list(tools) or None}
        request = ChatCompletionRequest(**fields)
        reasoning, content = "", text
        if self._reasoning is not None:
            reader: Any = self._reasoning(self._tokenizer)
            before = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
            reader.adjust_initial_state_from_prompt(list(before))
            found, rest = reader.extract_reasoning(text, request)
            reasoning, content = found or "", rest or ""
        calls: list[dict[str, Any]] = []
        problem = ""
        if tools and content:
            maker: Any = self._calls
            found = maker(self._tokenizer, request.tools).extract_tool_calls(content, request)
            try:
                calls = list(_calls(found.tool_calls))
            except (TypeError, ValueError) as error:
                problem = f"the tool call cannot be read: its arguments must be an object: {error}"
            else:
                content = (found.content or "").strip() if calls else content
        return Said(
            text=text,
            content=content,
            reasoning=reasoning.strip(),
            tool_calls=calls,
            problem=problem,
        )


def _calls(found: Any) -> Iterator[dict[str, Any]]:
    for call in found:
        arguments = json.loads(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            raise TypeError(f"{call.function.arguments!r}")
        yield {
            "type": "function",
            "function": {"name": str(call.function.name), "arguments": arguments},
        }
