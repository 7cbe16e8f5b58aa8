"""Parsers of a model's turn: where its reasoning ends, and which tools it calls.

Most are *response templates* of Transformers, others vLLM's. A model's is the one that
`model.parser` names, or its family's.
"""

from __future__ import annotations

import functools
import json
import logging
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import ParsedTurn, tool_call
from umbra.services.modeling.chat_template import TOOL, ChatTemplate, trial_tool

log = logging.getLogger(__name__)

Tools = Sequence[dict[str, Any]]
_CALLS = "tool_calls"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # as response templates name it

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
"""The parser for models whose chat template knows no tools, which are named in a system message
(`chat_template.with_tools`)."""


class Parser:
    """A way of writing reasoning and calls; by this one all of a turn is words."""

    name = "none"
    calls = False  # it reads calls of tools
    marked = False  # it needs the special tokens in a turn's text
    plain = True  # without tools all of a turn is words

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> ParsedTurn:
        """Read the turn `text`.

        Args:
            prompt: the end of the text before it; a template may have begun the reasoning there.
            tools: those that the prompt describes. Without any, nothing is taken for a call.
            stop: the end token that follows the turn, or "".
        """
        del prompt, tools, stop
        return ParsedTurn(text=text, content=text)


PLAIN = Parser()


class ResponseTemplateParser(Parser):
    """A response template of Transformers, by its name in `model.parser`; ValueError if it is none.

    With `told`, calls are read as a system message has told the model to write them.
    """

    def __init__(self, name: str, template: dict[str, Any], *, told: bool = False) -> None:
        fields = dict(template.get("fields", {}))
        if told:
            fields[_CALLS] = TOLD["fields"][_CALLS]
            template = {**template, "fields": dict(fields)}
        self.name = name
        self.calls = _CALLS in fields
        self.marked = set(fields) > {_CALLS, "content"}
        self._calling = load_response_template(template)
        fields.pop(_CALLS, None)
        self.plain = fields == {"content": TOLD["fields"]["content"]}
        self._silent = load_response_template({**template, "fields": fields}) if fields else None

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> ParsedTurn:
        template = self._calling if tools or self._silent is None else self._silent
        prefix = prompt if template.start_anchor_re.search(prompt) is not None else ""
        content, reasoning, calls, problem = _parse(template, prefix, tools, text, stop)
        if problem:  # it is none: it and all around it are words
            calls, content, reasoning = [], text, ""
            if self._silent is not None:
                content, reasoning, *_ = _parse(self._silent, prefix, (), text, stop)
        content = content.removesuffix(stop)
        if calls:
            content = content.strip()
        if text.strip() and not (content or reasoning or calls):
            content = text  # it fits no field of the response template
        return ParsedTurn(
            text=text,
            content=content,
            reasoning=reasoning.strip(),
            tool_calls=calls,
            problem=problem and f"the tool call cannot be read: {problem}",
        )


def _parse(
    template: Any, prefix: str, tools: Tools, text: str, stop: str
) -> tuple[str, str, list[dict[str, Any]], str]:
    """Return content, reasoning and calls of a turn, and the fault of a call, or ""."""
    words: defaultdict[str, str] = defaultdict(str)
    calls: list[dict[str, Any]] = []
    parser = ResponseParser(template, prefix=prefix, tools=list(tools) or None)
    try:
        for event in [*parser.feed(text), *parser.feed(stop), *parser.finalize()[1]]:
            if event["type"] == "region_chunk":
                words[event["field"]] += event["text"]
            elif event["type"] == "region_close" and event["field"] == _CALLS:
                calls.append(event["value"])
        problem = next(filter(None, map(_fault, calls)), "")
    except ValueError as error:
        problem = str(error.__cause__ or error)
    field = template.fields.get(_CALLS)
    if field is not None and (calls or problem) and not _is_closed(field, text + stop):
        problem = "it is not closed"
    return words["content"], "".join(words[name] for name in _REASONING), calls, problem


def _is_closed(calls: Any, text: str) -> bool:
    """True if the last call in `text` ends: the library also gives calls that break off."""
    opened = [match.end() for match in calls.open_re.finditer(text)]
    return calls.close_re is None or bool(calls.close_re.search(text, opened[-1] if opened else 0))


def _fault(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "it must be an object with a name and arguments"
    an_object = isinstance(function.setdefault("arguments", {}), dict)
    return "" if an_object else "its arguments must be an object"


VLLM = "vllm/"  # begins the names of vLLM's parsers
FAMILIES = (
    ("<arg_key>", "glm4moe"),
    ("<function=", "qwen3_5"),
    ("<|tool_call>call:", "gemma4"),
    ("<|channel|>", "gptoss"),
    ("<|tool_call_start|>", f"{VLLM}lfm2"),
    ("[TOOL_CALLS]", f"{VLLM}mistral"),
    ("<｜Assistant｜><think>", "deepseek_r1"),
    ("<｜tool▁calls▁begin｜>", f"{VLLM}deepseek_v3"),
    ("<tool_call>", "qwen3"),
    ('"parameters": ', "llama3"),
)
"""A text in the chat templates of a family of models, and the name of its parser."""
_WORDS = "Well, f(x) is 1 (or 2), and so on."  # which some take for a call
_CALL = tool_call(TOOL, {"place": "Lund 4", "days": 3}, "call00000")
_SCHEMA = trial_tool(place="string", days="integer")


def choose_parser(choice: str, tokenizer: Any, template: ChatTemplate | None) -> Parser:
    """Return the parser that `model.parser` names, or with "auto" the model family's.

    If no family's parser reads back the calls of `template`, turns are plain text. Raises
    UsageError if there is no parser of that name.
    """
    if choice == "none" or (choice == "auto" and template is None):
        return PLAIN
    if choice == "auto":
        assert template is not None
        return _of_family(tokenizer, template)
    parser = _named(choice, tokenizer)
    if template is not None and template.writes_calls and not _reads_back(parser, template):
        log.warning("model.parser = %s does not read the calls of %s", choice, template.name)
    return parser


@functools.cache
def response_templates() -> dict[str, dict[str, Any]]:
    """Load the response templates of Transformers by the name of their family."""
    file = Path(__file__).with_name("response_templates.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _of_family(tokenizer: Any, template: ChatTemplate) -> Parser:
    own_template = getattr(tokenizer, "response_template", None)
    if isinstance(own_template, dict) and (template.writes_calls or not template.tells_tools):
        return ResponseTemplateParser("model", own_template, told=not template.tells_tools)
    text = str(tokenizer.chat_template)
    names = [name for mark, name in FAMILIES if mark in text]
    if not template.tells_tools:  # calls are in plain text, as a system message says
        known = response_templates()
        name = next((name for name in names if name in known), "told")
        return ResponseTemplateParser(name, known.get(name, TOLD), told=True)
    if not template.writes_calls:
        return PLAIN
    for name in names:
        try:
            if _reads_back(parser := _named(name, tokenizer), template):
                return parser
        except UsageError as error:
            log.warning("%s", error)
    return PLAIN


def _named(choice: str, tokenizer: Any) -> Parser:
    key, known = f"model.parser = {choice}", response_templates()
    if choice in known:
        return ResponseTemplateParser(choice, known[choice])
    if not choice.startswith(VLLM):
        raise UsageError(
            f"{key} is unknown; use auto, none, {', '.join(known)}, or {VLLM}TOOLS "
            f"or {VLLM}TOOLS+REASONING (parsers of vLLM)"
        )
    if find_spec("vllm") is None:
        raise UsageError(f'{key} needs vLLM: pip install "umbra-rl[vllm]"')
    calls, _, reasoning = choice.removeprefix(VLLM).partition("+")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            return VllmParser(tokenizer, calls, reasoning)
    except Exception as error:
        raise UsageError(f"{key}: vLLM says: {error}") from error


def _reads_back(parser: Parser, template: ChatTemplate) -> bool:
    """Return whether `parser` reads a call and plain words as `template` writes them."""

    def read(**turn: Any) -> ParsedTurn:
        prompt, text, stop = template.turn_text({"role": "assistant", **turn}, [_SCHEMA])
        return parser.read(prompt, text, [_SCHEMA], stop)

    try:
        called, words = read(content="", tool_calls=[_CALL]), read(content=_WORDS)
    except Exception as error:  # noqa: BLE001 - a parser of another family may fail anyhow
        log.debug("%s: %s", parser.name, error)
        return False
    calls = [call["function"] for call in called.tool_calls]
    said = words.content.strip()
    return calls == [_CALL["function"]] and said == _WORDS and not words.tool_calls


class VllmParser(Parser):
    """Parsers of vLLM: of tool calls, and if it is named, of reasoning.

    Raises whatever vLLM says of a name that it does not know, or of a tokenizer for another parser.
    """

    calls = marked = True
    plain = False

    def __init__(self, tokenizer: Any, calls: str, reasoning: str = "") -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self.name = f"{VLLM}{calls}" + (f"+{reasoning}" if reasoning else "")
        self._tokenizer = tokenizer
        self._calls = ToolParserManager.get_tool_parser(calls)
        self._reasoning = (
            ReasoningParserManager.get_reasoning_parser(reasoning) if reasoning else None
        )
        self.read("", "", [])  # some refuse tokenizers

    def read(self, prompt: str, text: str, tools: Tools, stop: str = "") -> ParsedTurn:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        del stop
        user: Any = {"role": "user", "content": ""}
        fields: dict[str, Any] = {"messages": [user], "tools": list(tools) or None}
        request = ChatCompletionRequest(**fields)
        reasoning, content = "", text
        if self._reasoning is not None:
            reader: Any = self._reasoning(self._tokenizer)
            prompt_ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
            reader.adjust_initial_state_from_prompt(list(prompt_ids))
            result, rest = reader.extract_reasoning(text, request)
            reasoning, content = result or "", rest or ""
        turn = ParsedTurn(text=text, content=content, reasoning=reasoning.strip())
        if not (tools and content):
            return turn
        maker: Any = self._calls
        result = maker(self._tokenizer, request.tools).extract_tool_calls(content, request)
        calls: list[dict[str, Any]] = []
        try:
            for call in result.tool_calls:
                arguments = json.loads(call.function.arguments or "{}")
                if not isinstance(arguments, dict):
                    raise TypeError(f"{call.function.arguments!r}")
                calls.append(tool_call(str(call.function.name), arguments))
        except (TypeError, ValueError) as error:
            problem = f"the tool call cannot be read: its arguments must be an object: {error}"
            return replace(turn, problem=problem)
        said = (result.content or "").strip() if calls else content
        return replace(turn, content=said, tool_calls=calls)
