"""Parsers of a model's turn: where its reasoning ends, and which tools it calls.

A parser reads a turn piece by piece, so that it can be passed on while the model speaks. Most are
*response templates* of Transformers; `vllm_parsers.py` has vLLM's, and `parser_choice.py` finds the
one for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from umbra.services.environments.protocol import Said

Kind = Literal["content", "reasoning"]
Tools = Sequence[dict[str, Any]]
_CALLS = "tool_calls"
_KINDS: dict[str, Kind] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
}
"""The fields of an assistant's message that are words, as response templates name them."""
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


Piece = tuple[str, str]
"""Some more of what the model says: "content" or "reasoning", and the text."""


class Reading(Protocol):
    """One turn while it is read."""

    def feed(self, text: str) -> list[Piece]:
        """What is certain now that the turn goes on by `text`, as far as it was not before."""
        ...

    def end(self, stop: str = "") -> Said:
        """The whole turn, now that it is over. `stop` is the end token, if it has one."""
        ...


class Parser(Protocol):
    """A way of writing reasoning and calls."""

    name: str
    calls: bool
    """It reads calls of tools."""
    marked: bool
    """It needs the special tokens in a turn's text."""

    def begin(self, prompt: str, tools: Tools) -> Reading:
        """Read a turn.

        Args:
            prompt: the end of the text before it; a template may have begun the reasoning there.
            tools: those that the prompt describes. Without any, nothing is taken for a call.
        """
        ...


def read(parser: Parser, prompt: str, text: str, tools: Tools, stop: str = "") -> Said:
    """Read the whole turn `text`, which the end token `stop` follows."""
    reading = parser.begin(prompt, tools)
    reading.feed(text)
    said = reading.end(stop)
    if not said.problem:
        return said
    reading = parser.begin(prompt, tools)
    feed_slowly(reading, text)
    return reading.end(stop)


def feed_slowly(reading: Reading, text: str) -> list[Piece]:
    """As `Reading.feed`, but it is known where a call begins that turns out to be broken.

    Transformers tells nothing of a text in which something is wrong, so it gets small ones.
    """
    steps = range(0, len(text), _STEP)
    return [piece for at in steps for piece in reading.feed(text[at : at + _STEP])]


class PlainParser:
    """All of a turn is words."""

    name = "none"
    calls = False
    marked = False

    def begin(self, prompt: str, tools: Tools) -> Reading:
        del prompt, tools
        return _PlainReading()


class _PlainReading:
    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return [("content", text)] if text else []

    def end(self, stop: str = "") -> Said:
        del stop
        return Said(text=self._text, content=self._text)


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
            fields = {**fields, **{key: TOLD["fields"][key] for key in (_CALLS,)}}
            template = {**template, "fields": fields}
        self.name = name
        self.calls = _CALLS in fields
        self.marked = set(fields) > {_CALLS, "content"}
        self._read = self.calls and not told
        self._calling = load_response_template(template)
        fields.pop(_CALLS, None)
        self._silent = load_response_template({**template, "fields": fields}) if fields else None

    def begin(self, prompt: str, tools: Tools) -> Reading:
        template = self._calling if tools or self._silent is None else self._silent
        anchored = template.start_anchor_re.search(prompt) is not None
        return _TemplateReading(template, prompt if anchored else "", tools, self._read)


class _TemplateReading:
    def __init__(self, template: Any, prompt: str, tools: Tools, read: bool) -> None:
        self._parser = ResponseParser(template, prefix=prompt, tools=list(tools) or None)
        self._calls_field = template.fields.get(_CALLS)
        self._read = read
        self._text = ""
        self._said: dict[Kind, str] = {"content": "", "reasoning": ""}
        self._calls: list[dict[str, Any]] = []
        self._starts: list[int] = []  # of the calls
        self._problem = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        if self._problem:
            return [self._say("content", text)] if text else []
        try:
            return self._take(self._parser.feed(text))
        except ValueError as error:
            return self._break(error)

    def end(self, stop: str = "") -> Said:
        self.feed(stop)
        if not self._problem:
            try:
                _, events = self._parser.finalize()
                self._take(events)
            except ValueError as error:
                self._break(error)
        text = self._text.removesuffix(stop)
        content, reasoning = self._said["content"], self._said["reasoning"]
        content = content.removesuffix(stop) if stop else content
        if self._calls and not self._problem:
            content = content.strip()
        if text.strip() and not (content or reasoning or self._calls):
            content = text  # it fits no field of the response template
        return Said(
            text=text,
            content=content,
            reasoning=reasoning.strip(),
            tool_calls=[] if self._problem else self._calls,
            problem=self._problem,
            read=self._read,
        )

    def _take(self, events: list[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            kind = _KINDS.get(event["field"])
            if event["type"] == "region_chunk" and kind is not None:
                pieces.append(self._say(kind, event["text"]))
            elif event["field"] == _CALLS and event["type"] == "region_open":
                self._starts.append(self._last_start())
            elif event["field"] == _CALLS and event["type"] == "region_close":
                if (problem := self._fault(event["value"])) is not None:
                    pieces += self._break(problem)
                    break
                self._calls.append(event["value"])
        return pieces

    def _say(self, kind: Kind, text: str) -> Piece:
        self._said[kind] += text
        return kind, text

    def _last_start(self) -> int:
        starts = [found.start() for found in self._calls_field.open_re.finditer(self._text)]
        return starts[-1] if starts else len(self._text)

    def _fault(self, call: Any) -> ValueError | None:
        """What is wrong with a call; the library also gives those that break off."""
        if not self._is_closed():
            return ValueError("it is not closed")
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return ValueError("it must be an object with a name and arguments")
        function.setdefault("arguments", {})
        if not isinstance(function["arguments"], dict):
            return ValueError("its arguments must be an object")
        return None

    def _is_closed(self) -> bool:
        close = self._calls_field.close_re
        start = self._starts[-1] if self._starts else 0
        return close is None or close.search(self._text, start) is not None

    def _break(self, error: ValueError) -> list[Piece]:
        """A call is none: it and all that stands beside it are words."""
        cause = error.__cause__ or error if self._is_closed() else "it is not closed"
        self._problem = f"the tool call cannot be read: {cause}"
        rest = self._text[self._starts[0] if self._starts else 0 :]
        return [self._say("content", rest)] if rest else []
