"""Which dialect a chat template has: found by reading back what the template writes.

A template is asked to write a turn with calls, one with reasoning and one of plain words. The
dialect that reads from them what was put in is the model's. No name of a model is looked at.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message
from umbra.services.modeling import vllm_dialect
from umbra.services.modeling.chat_template import ChatTemplate, TurnsError
from umbra.services.modeling.dialect import (
    PLAIN,
    TOLD,
    Dialect,
    ResponseTemplateDialect,
    read,
)

TRL = "trl/"
_OWN = "model"
_TOLD = "told"
_NEEDED = 4  # points of a turn that has to be read right
_TOOL = "umbratool"
_ARGUMENTS = {"place": "Lund 4", "days": 3}
_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Marks.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a place"},
                "days": {"type": "integer", "description": "a number"},
            },
            "required": ["place", "days"],
        },
    },
}
_WORDS = "Well, f(x) is 1 (or 2), and so on."  # which some take for a call
_THOUGHT = "UMBRATHOUGHT"

log = logging.getLogger(__name__)


def find_dialect(wanted: str, tokenizer: Any, template: ChatTemplate | None) -> Dialect:
    """The dialect that `model.dialect` names, or the one that fits `template`.

    Raises:
        UsageError: there is none of that name here.
    """
    if wanted == "none" or (wanted == "auto" and template is None):
        return PLAIN
    if wanted == "auto":
        assert template is not None
        return _search(tokenizer, template)
    found = _named(wanted, tokenizer)
    if template is not None and template.writes_calls and found.calls and not fit(found, template):
        log.warning(
            "model.dialect = %s does not read the calls that %s writes", wanted, template.name
        )
    return found


def fit(dialect: Dialect, template: ChatTemplate) -> int:
    """How much of what the template writes `dialect` reads back; 0 if it misses calls or words."""
    calls = [[_call(i) for i in range(count)] for count in (1, 2)]
    points = 0
    for number, called in enumerate(calls):
        said = {"role": "assistant", "content": "", "tool_calls": called}
        found = _read_back(dialect, template, said)
        if found is None:
            if number == 0:
                return 0
            continue  # some templates write one call a turn only
        given = [call["function"] for call in found.tool_calls]
        if given != [call["function"] for call in called]:
            return 0
        points += _NEEDED
    words = _read_back(dialect, template, {"role": "assistant", "content": _WORDS})
    if words is None or words.tool_calls or words.content.strip() != _WORDS:
        return 0
    return points + _NEEDED + _fit_reasoning(dialect, template)


def _fit_reasoning(dialect: Dialect, template: ChatTemplate) -> int:
    """Points for reasoning: kept apart from words, also if it is never ended."""
    said = {"role": "assistant", "content": _WORDS, "reasoning_content": _THOUGHT}
    points = 0
    with suppress(TurnsError):
        prompt, text, stop = template.turn_text(said, [_SCHEMA])
        if _THOUGHT not in text:
            return 0
        found = read(dialect, prompt, text, [_SCHEMA], stop)
        points += found.reasoning == _THOUGHT and found.content.strip() == _WORDS
        cut = text[: text.index(_THOUGHT) + len(_THOUGHT)]
        found = read(dialect, prompt, cut, [_SCHEMA])
        points += found.reasoning == _THOUGHT and not found.content
    return points


def _read_back(dialect: Dialect, template: ChatTemplate, said: Message) -> Any:
    try:
        prompt, text, stop = template.turn_text(said, [_SCHEMA])
    except TurnsError:
        return None
    called = said.get("tool_calls", ())
    if text.count(_TOOL) < len(called):
        return None
    try:
        return read(dialect, prompt, text, [_SCHEMA], stop)
    except Exception as error:  # noqa: BLE001 - a parser that is for other models may fail anyhow
        log.debug("%s: %s", dialect.name, error)
        return read(PLAIN, prompt, text, [])


def _call(index: int) -> dict[str, Any]:
    function = {"name": _TOOL, "arguments": {**_ARGUMENTS, "days": 3 + index}}
    return {"id": f"call{index:05d}", "type": "function", "function": function}


# -- which there are ------------------------------------------------------------------------------


def _search(tokenizer: Any, template: ChatTemplate) -> Dialect:
    known = _known(tokenizer)
    if not template.writes_calls:
        # Its reasoning can be read; calls are in plain text, or of a form that nobody shows us.
        if not template.tells_tools:
            return ResponseTemplateDialect(*(known or (_TOLD, TOLD)), told=True)
        if known is None:
            return PLAIN
        silent = {key: value for key, value in known[1]["fields"].items() if key != "tool_calls"}
        return ResponseTemplateDialect(known[0], {**known[1], "fields": silent})
    best, most = None, 0
    for dialect, exactly in _candidates(known, tokenizer):
        points = fit(dialect, template)
        if points > most:
            best, most = dialect, points
        if points and exactly:
            break
    if best is None:
        best = _of_vllm(tokenizer, template)
    return best or PLAIN


def _known(tokenizer: Any) -> tuple[str, dict[str, Any]] | None:
    """The response template that the model brings along, or that TRL has for its chat template."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict):
        return _OWN, own
    utils = _trl()
    if utils is None:
        return None
    probe = _Templated(tokenizer.chat_template)
    try:
        utils.add_response_schema(probe)
    except ValueError:
        return None
    for name, template in _of_trl().items():
        if template is probe.response_template:
            return TRL + name, template
    return None


class _Templated:
    """What TRL looks at and writes to."""

    response_template: Any = None

    def __init__(self, chat_template: Any) -> None:
        self.chat_template = chat_template


def _candidates(
    known: tuple[str, dict[str, Any]] | None, tokenizer: Any
) -> Iterator[tuple[Dialect, bool]]:
    if known is not None:
        yield ResponseTemplateDialect(*known), True
    for name, template in _of_trl().items():
        yield ResponseTemplateDialect(TRL + name, template), False


def _of_vllm(tokenizer: Any, template: ChatTemplate) -> Dialect | None:
    if not vllm_dialect.is_installed():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return _fitting(tokenizer, template)


def _fitting(tokenizer: Any, template: ChatTemplate) -> Dialect | None:
    for calls in vllm_dialect.tool_parsers():
        dialect = _made(tokenizer, calls)
        if dialect is None or not fit(dialect, template):
            continue
        best, most = dialect, _fit_reasoning(dialect, template)
        for reasoning in vllm_dialect.reasoning_parsers():
            both = _made(tokenizer, calls, reasoning)
            if both is not None and (points := _fit_reasoning(both, template)) > most:
                if fit(both, template):
                    best, most = both, points
        return best
    return None


def _made(tokenizer: Any, calls: str, reasoning: str = "") -> Dialect | None:
    try:
        return vllm_dialect.VllmDialect(tokenizer, calls, reasoning)
    except Exception as error:  # noqa: BLE001 - parsers refuse tokenizers in any way they like
        log.debug("vLLM's parser %s %s: %s", calls, reasoning, error)
        return None


def _trl() -> Any:
    if find_spec("trl") is None:
        return None
    from trl import chat_template_utils

    return chat_template_utils


def _of_trl() -> dict[str, dict[str, Any]]:
    """TRL's response templates by name: "qwen3", "gemma4", ..."""
    end, utils = "_template", _trl()
    return {
        name.removesuffix(end): value
        for name, value in sorted(vars(utils).items() if utils is not None else [])
        if name.endswith(end) and isinstance(value, dict) and "fields" in value
    }


def _named(wanted: str, tokenizer: Any) -> Dialect:
    key = f"model.dialect = {wanted}"
    if wanted.startswith(TRL):
        templates = _of_trl()
        if not templates:
            raise UsageError(f'{key} needs TRL: pip install "umbra-rl[dialects]"')
        if (template := templates.get(wanted.removeprefix(TRL))) is None:
            raise UsageError(f"{key}: TRL has {', '.join(TRL + name for name in templates)}")
        return ResponseTemplateDialect(wanted, template)
    if wanted.startswith(vllm_dialect.PREFIX):
        if not vllm_dialect.is_installed():
            raise UsageError(f'{key} needs vLLM: pip install "umbra-rl[vllm]"')
        calls, _, reasoning = wanted.removeprefix(vllm_dialect.PREFIX).partition("+")
        try:
            return vllm_dialect.VllmDialect(tokenizer, calls, reasoning)
        except Exception as error:
            raise UsageError(f"{key}: vLLM says: {error}") from error
    return _from_file(wanted, key)


def _from_file(wanted: str, key: str) -> Dialect:
    if not wanted.endswith(".json"):
        raise UsageError(
            f"{key} is unknown; use auto, none, {TRL}NAME, {vllm_dialect.PREFIX}TOOLS or "
            f"{vllm_dialect.PREFIX}TOOLS+REASONING (parsers of vLLM), or a .json file with a "
            "response template of Transformers"
        )
    try:
        return ResponseTemplateDialect(wanted, json.loads(Path(wanted).read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"{key} cannot be read: {error}") from error
    except ValueError as error:
        raise UsageError(f"{key} is no response template of Transformers: {error}") from error
