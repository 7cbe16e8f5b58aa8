"""Parsers of a model's turn: where its reasoning ends, and which tools it calls.

Most are *response templates* of Transformers; `vllm_parsers.py` has vLLM's, and `parser_choice.py`
finds the one for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from umbra.services.environments.protocol import Said

Tools = Sequence[dict[str, Any]]
_CALLS = "tool_calls"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # as response templates name it
_STEP = 16  # characters, fewer than a call with its beginning and its end

TOLD: dict[str, Any] = {
    "start_anchor_pattern": r"\Z",
    "fields": {
        _CALLS: {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""Reads the calls of models whose chat template knows no tools, which are told of them in a system
message (`chat_template.with_tools`)."""


class Parser(Protocol):
    """A way of writing reasoning and calls.

    `calls`: it reads calls of tools. `marked`: it needs the special tokens in a turn's text.
    """

    name: str
    calls: bool
    marked: bool

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> Said:
        """Read the turn `text`.

        Args:
            prompt: the end of the text before it; a template may have begun the reasoning there.
            tools: those that the prompt describes. Without any, nothing is taken for a call.
            stop: the end token that follows the turn, or "".
        """
        ...


class PlainParser:
    """All of a turn is words."""

    name = "none"
    calls = False
    marked = False

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> Said:
        """Read the turn; see `Parser`."""
        del prompt, tools, stop
        return Said(text=text, content=text)


PLAIN = PlainParser()


class ResponseTemplateParser:
    """A response template of Transformers.

    Args:
        name: as in `model.parser`.
        template: the response template.
        told: whether calls are read as a system message has told the model to write them.

    Raises:
        ValueError: it is no response template.
    """

    def __init__(self, name: str, template: dict[str, Any], *, told: bool = False) -> None:
        fields = dict(template.get("fields", {})) if isinstance(template, dict) else {}
        if told:
            fields = {**fields, _CALLS: TOLD["fields"][_CALLS]}
            template = {**template, "fields": fields}
        self.name = name
        self.calls = _CALLS in fields
        self.marked = set(fields) > {_CALLS, "content"}
        self._calling = load_response_template(template)
        fields.pop(_CALLS, None)
        self._silent = load_response_template({**template, "fields": fields}) if fields else None

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> Said:
        """Read the turn; see `Parser`."""
        template = self._calling if tools or self._silent is None else self._silent
        prefix = prompt if template.start_anchor_re.search(prompt) is not None else ""
        turn = _Turn(template, prefix, tools, [text, stop])
        if turn.problem:
            # Transformers tells nothing of a text in which something is wrong. Where the broken
            # call begins is known if it gets small ones.
            steps = [text[at : at + _STEP] for at in range(0, len(text), _STEP)]
            turn = _Turn(template, prefix, tools, [*steps, stop])
        content = turn.content.removesuffix(stop)
        if turn.calls:
            content = content.strip()
        if text.strip() and not (content or turn.reasoning or turn.calls):
            content = text  # it fits no field of the response template
        return Said(
            text=text,
            content=content,
            reasoning=turn.reasoning.strip(),
            tool_calls=turn.calls,
            problem=turn.problem,
        )


class _Turn:
    """A turn that is read piece by piece."""

    def __init__(self, template: Any, prefix: str, tools: Tools, pieces: Sequence[str]) -> None:
        self.content = self.reasoning = self.problem = ""
        self.calls: list[dict[str, Any]] = []
        self._calls_field = template.fields.get(_CALLS)
        self._text = ""
        self._starts: list[int] = []  # of the calls
        self._before = ""  # the content before the first of them
        parser = ResponseParser(template, prefix=prefix, tools=list(tools) or None)
        try:
            for piece in pieces:
                self._text += piece
                self._take(parser.feed(piece))
            self._take(parser.finalize()[1])
        except ValueError as error:
            cause = error.__cause__ or error if self._is_closed() else "it is not closed"
            self.problem = f"the tool call cannot be read: {cause}"
            # It is none: it and all that follows the first one are words.
            self.content = self._before + "".join(pieces)[self._starts[0] if self._starts else 0 :]
            self.calls = []

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == "content":
                self.content += event["text"]
            elif kind == "region_chunk" and field in _REASONING:
                self.reasoning += event["text"]
            elif field == _CALLS and kind == "region_open":
                if not self._starts:
                    self._before = self.content
                opened = [found.start() for found in self._calls_field.open_re.finditer(self._text)]
                self._starts.append(opened[-1] if opened else len(self._text))
            elif field == _CALLS and kind == "region_close":
                if fault := self._fault(event["value"]):
                    raise ValueError(fault)
                self.calls.append(event["value"])

    def _fault(self, call: Any) -> str:
        """Return what is wrong with a call, or ""; the library also gives those that break off."""
        if not self._is_closed():
            return "it is not closed"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return "it must be an object with a name and arguments"
        if not isinstance(function.setdefault("arguments", {}), dict):
            return "its arguments must be an object"
        return ""

    def _is_closed(self) -> bool:
        close = self._calls_field.close_re
        start = self._starts[-1] if self._starts else 0
        return close is None or close.search(self._text, start) is not None
