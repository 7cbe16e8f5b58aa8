"""Every chat template that TRL ships: turns appended one by one equal the whole conversation.

`docs/models.md` has the outcome as a table. After a change that is meant:

    PYTHONPATH=tests python tests/modeling/test_chat_templates.py
"""

import functools
from importlib.util import find_spec
from typing import Any

import pytest
from fakes import models_page
from fakes.chat_templates import chat_tokenizer, template_names, weather

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message, Opening, ParsedTurn, tool_call
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.chat_template import as_text, with_tools

WEATHER = weather(city={"type": "string", "description": "its name"})
ASKED = {"role": "user", "content": "How warm is it?"}
USER, TOOL, TOOLS = ("user",), ("tool",), ("tool", "tool")
CONVERSATIONS: dict[str, list[tuple[str, ...]]] = {
    "the user goes on": [USER, USER, USER],
    "a tool answers": [TOOL, TOOL, TOOL],
    "two at once": [TOOLS, TOOLS],
    "both": [TOOL, USER, TOOL, TOOL, USER],
}
EQUAL, CHANGED = "equal", "its turns stay"
NAMES = [*template_names(), *template_names(training=True)]


@functools.cache
def chat_of(name: str) -> Chat:
    return Chat(*chat_tokenizer(name))


def call(number: int, index: int) -> dict[str, Any]:
    return tool_call("weather", {"city": f"Lund{number}{index}"}, f"call{number:02d}{index:03d}")


def said(number: int, calls: int, field: str = "") -> Message:
    """A turn of the model with reasoning in `field`: words, or calls."""
    message: Message = {"role": "assistant", "content": "" if calls else f"Words{number}."}
    if calls:
        message["tool_calls"] = [call(number, index) for index in range(calls)]
    if field == "content":
        return message | {"content": f"<think>\nDoubts{number}\n</think>\n\n{message['content']}"}
    return message | ({field: f"Doubts{number}"} if field else {})


def heard(number: int, roles: tuple[str, ...]) -> list[Message]:
    return [
        {"role": role, "content": f"Heard{number}{i}?"}
        | ({"tool_call_id": call(number, i)["id"]} if role == "tool" else {})
        for i, role in enumerate(roles)
    ]


class Whole:
    """The output of a template, asked directly."""

    def __init__(self, name: str) -> None:
        self.tokenizer, _ = chat_tokenizer(name)
        self.tells_tools = "weather" in self._text([ASKED], [WEATHER], cue=True)
        called = [ASKED, said(0, 1), *heard(0, TOOL)]
        self.writes_calls = self.tells_tools and "Lund00" in self._text(called, [WEATHER], cue=True)

    def ids(self, messages: list[Message], *, tools: bool, cue: bool = True) -> list[int]:
        if tools and not self.tells_tools:
            messages, tools = with_tools(as_text(messages), [WEATHER]), False
        text = self._text(messages, [WEATHER] if tools else [], cue=cue)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, messages: list[Message], tools: list[Any], *, cue: bool) -> str:
        names = {c["id"]: c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
        named = [
            {**m, "name": names.get(m["tool_call_id"])} if m.get("tool_call_id") in names else m
            for m in messages
        ]
        return self.tokenizer.apply_chat_template(
            named, tools=tools or None, tokenize=False, add_generation_prompt=cue
        )


def converse(name: str, kinds: list[tuple[str, ...]], field: str) -> bool:
    """Hold the conversation by appending, and compare it with the whole.

    Return whether the model's turns, reasoning included, and their cues are the whole's, too; raise
    UsageError if the template is refused.
    """
    whole, chat = Whole(name), chat_of(name)
    tools = any(roles[0] == "tool" for roles in kinds)
    opening = Opening([ASKED], [WEATHER] if tools else [])
    prompt = chat.prompt_ids(opening.messages, opening.tools)
    assert prompt == whole.ids([ASKED], tools=tools)
    bare = whole.ids([ASKED], tools=tools, cue=False)
    cue = prompt[len(bare) :] if prompt[: len(bare)] == bare else []
    messages, tails = [ASKED], list[list[int]]()
    for number, roles in enumerate(kinds):
        message, answers = said(number, roles.count("tool"), field), heard(number, roles)
        given = message.get("tool_calls", [])
        tails_of = [chat.turn_ids(answers, stop, given, opening) for stop in chat.stop_ids]
        tails.append(min(tails_of, key=len))  # the one after the turn's own end token, not repeated
        assert all(answer["content"] in chat.text(tails[-1]) for answer in answers)
        messages += [message if whole.writes_calls else as_text([message])[0], *answers]
    ids = whole.ids(messages, tools=tools)
    assert ids[-len(tails[-1]) :] == tails[-1]
    equal, at, before = True, 0, prompt
    for number, tail in enumerate(tails):
        # What stands before the model's turn, with the cue if the template leaves it there.
        if ids[at : at + len(before)] != before:
            equal = False
            assert cue and before[-len(cue) :] == cue
            before = before[: -len(cue)]
            assert ids[at : at + len(before)] == before
        at += len(before)
        end = len(ids) - len(tail)
        if tail is not tails[-1]:
            part = tail[: -len(cue)] if cue and tail[-len(cue) :] == cue else tail
            end = next(n for n in range(at, len(ids)) if ids[n : n + len(part)] == part)
        own = chat.text(ids[at:end])
        assert ids[end - 1] in chat.stop_ids and "Heard" not in own
        assert f"Words{number}" in own or f"Lund{number}0" in own
        equal = equal and (not field or f"Doubts{number}" in own)
        at, before = end, tail
    return equal


def field_of(name: str) -> str:
    """Where the template takes a model's reasoning from, as its source says."""
    source = chat_tokenizer(name)[0].chat_template
    for known in ("reasoning_content", "thinking"):
        if any(f"{sign}{known}" in source for sign in ("message.", "m.", "'", '"')):
            return known
    return "content"


def outcome(name: str, kinds: list[tuple[str, ...]]) -> str:
    try:
        plain = converse(name, kinds, "")
        reasoned = converse(name, kinds, field_of(name))
    except UsageError as error:
        return f"refused: {str(error).removeprefix(f'the chat template of {name} ')}"
    chat = chat_of(name)
    # Or the template's cue has the model answer without reasoning.
    quick = plain and chat.text(chat.prompt_ids([ASKED])).rstrip().endswith("</think>")
    return EQUAL if reasoned or quick else CHANGED


def read_back(name: str, calls: int, field: str = "") -> ParsedTurn | None:
    """Return a turn read back from the template; None if that is refused or does not write it."""
    whole, chat, message = Whole(name), chat_of(name), said(0, calls, field)
    try:
        prompt = chat.prompt_ids([ASKED], [WEATHER])
        written = message if whole.writes_calls else as_text([message])[0]
        ids = whole.ids([ASKED, written], tools=True, cue=False)
    except UsageError:
        return None
    if ids[: len(prompt)] != prompt:  # the cue is another one for this turn
        prompt = prompt[: [a == b for a, b in zip(ids, prompt, strict=False)].index(False)]
    turn = ids[len(prompt) :]
    ends = [index for index, token in enumerate(turn) if token in chat.stop_ids]
    turn = turn[: ends[-1] + 1] if ends else turn
    if calls and ("Lund00" not in chat.text(turn) or whole.tells_tools > whole.writes_calls):
        return None
    return chat.parse(turn, prompt, [WEATHER])


def calls_read(name: str) -> str:
    """Return the parser of a call as the template writes it, with words or reasoning around it."""
    found, parser = read_back(name, 1), chat_of(name).parser
    if found is None or not parser.calls:
        return "no"
    assert [called["function"] for called in found.tool_calls] == [call(0, 0)["function"]]
    assert (found.content, found.problem) == ("", "")
    words = read_back(name, 0)
    assert words is not None
    assert (words.content.strip(), words.tool_calls) == ("Words0.", [])
    return parser.name if Whole(name).tells_tools else "as text"


def reasoning_read(name: str) -> str:
    """Return whether reasoning is parsed apart from words and calls, if the template has it."""
    field, outcomes = field_of(name), set[bool]()
    for calls in (0, 1):
        found = read_back(name, calls, field)
        if found is not None and "Doubts0" in found.text:
            words = "" if calls and found.tool_calls else "Words0."
            outcomes.add((found.reasoning, found.content.strip()) == ("Doubts0", words))
    if outcomes == {True}:
        return "yes"
    # Templates that know no field for it, or drop it, do not show how their models write it.
    return "no" if outcomes and field != "content" else "-"


@functools.cache
def row(name: str) -> dict[str, str]:
    outcomes = {column: outcome(name, kinds) for column, kinds in CONVERSATIONS.items()}
    return {**outcomes, "calls are read by": calls_read(name), "reasoning": reasoning_read(name)}


def table() -> str:
    """The table of `docs/models.md`."""
    rows = {name: row(name) for name in NAMES}
    for name in template_names(training=True):
        if rows[name] == rows[name.removesuffix("_training")]:
            del rows[name]
    columns = [*CONVERSATIONS, "calls are read by", "reasoning"]
    reasons: list[str] = []

    def cell(text: str) -> str:
        what, refused, reason = text.partition("refused: ")
        if not refused:
            return what
        if reason not in reasons:
            reasons.append(reason)
        return f"refused ({reasons.index(reason) + 1})"

    alike: dict[str, list[str]] = {}
    for name, found in rows.items():
        alike.setdefault(" | ".join(cell(found[column]) for column in columns), []).append(name)
    lines = [
        "| template | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()),
    ]
    lines.append("")
    lines += [f"{number}. The template {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_what_start_says_is_what_the_conversation_shows(name: str) -> None:
    """`check_turns` is asked before a run: turns that are appended are what the template writes."""
    chat = chat_of(name)
    for column, kinds in list(CONVERSATIONS.items())[:3]:
        opening = Opening([ASKED], [WEATHER] if kinds[0][0] == "tool" else [])
        try:
            told = EQUAL if chat.check_turns(kinds[0], opening) else CHANGED
        except UsageError as error:
            assert error.args[0].startswith(f"the chat template of {name} ")
            assert row(name)[column].startswith("refused")
        else:
            assert told == row(name)[column], column
    # As Arrow and some clients add them: a template that tests for a key takes it for set.
    nothing = {"reasoning_content": None, "tool_calls": None, "name": None, "tool_call_id": None}
    messages = [ASKED, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    assert chat.prompt_ids([nothing | one for one in messages]) == chat.prompt_ids(messages)


@pytest.mark.skipif(find_spec("vllm") is None, reason="some rows name parsers of vLLM")
def test_the_document_has_the_outcome() -> None:
    text = models_page.PAGE.read_text(encoding="utf-8")
    assert f"<!-- chat templates -->\n{table()}<!-- end of chat templates -->\n" in text


if __name__ == "__main__":
    models_page.put("chat templates", table().rstrip("\n"))
