"""Text of chat templates between the model's turns, and a check that it can be appended.

A conversation goes on by appending tokens: the model's turn as it was sampled, and its *tail*, that
the template writes from the end of that turn to where the model speaks again. This is right if the
template writes the same for the whole conversation, the model's turns left aside. So it is tried:
for every kind of tail a conversation of marked words is rendered whole and compared (`find`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message, tool_call, tool_schema

RENDER_S = 20.0  # for a conversation, which takes milliseconds
_ROUNDS = 2  # some templates write a second tool answer otherwise than the first
_ASKED = "UMBRAASKED"
_HEARD = "UMBRAHEARD"
_TRUSTED = ("system", "developer", "assistant")  # roles whose special tokens are meant
_MARKS = re.compile("[\ue000\ue001]")
_QUOTED = re.compile("\ue000(.[^\ue001]*)\ue001", re.DOTALL)
TOOL = "umbratool"


def trial_tool(**types: str) -> dict[str, Any]:
    """Return the schema of a tool to try templates with; `types` are its parameters' types."""
    properties = {name: {"type": kind, "description": f"a {name}"} for name, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return tool_schema(TOOL, "Marks.", parameters)


_SCHEMA = trial_tool(mark="string")
_USER: Message = {"role": "user", "content": _ASKED}


class TurnsError(UsageError):
    """Turns can't be appended."""


class ChatTemplate:
    """The chat template of a tokenizer; arguments as of `Chat`."""

    def __init__(
        self, tokenizer: Any, stop_ids: Iterable[int], options: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._stops = [tokenizer.decode([token]) for token in sorted(stop_ids)]
        special = sorted(_special_tokens(tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join([*map(re.escape, special), _MARKS.pattern]))
        self.name = f"the chat template of {tokenizer.name_or_path}"
        # Templates take reasoning in one of these fields; else it is part of the text.
        source = re.sub(r"{#.*?#}", "", str(tokenizer.chat_template), flags=re.DOTALL)
        named = re.search(r"[.'\"](reasoning_content|thinking)\b", source)
        self.reasoning_field = named[1] if named else "content"
        self.find = functools.lru_cache(maxsize=256)(self._find)

    @functools.cached_property
    def _writes_text(self) -> bool:
        """False for some vision models' templates, which drop contents that are no lists."""
        return _ASKED in self._apply([_USER], (), cue=True)

    @functools.cached_property
    def tells_tools(self) -> bool:
        """True if it has words for tools; else plain text describes tools, calls and answers."""
        try:
            return TOOL in self._apply([_USER], [_SCHEMA], cue=True)
        except TurnsError:
            return False

    @functools.cached_property
    def writes_calls(self) -> bool:
        """True if it writes the calls of an earlier turn; else they are in that turn's text."""
        turn = _said(0, _calls(1))
        answers = _addressed([{"role": "tool", "content": _HEARD}], turn["tool_calls"])
        try:
            text = self._apply([_USER, turn, *answers], [_SCHEMA], cue=True)
        except TurnsError:
            return False
        return self.tells_tools and _mark(0, 0) in text

    def _fault(self, what: str) -> TurnsError:
        return TurnsError(f"{self.name} {what}")

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, cue: bool = True
    ) -> str:
        """Return the text of a conversation; with `cue`, up to where the model begins to speak.

        Raises TurnsError if the template fails on these messages, or writes no text of users.
        """
        if not self._writes_text:
            raise self._fault("does not write a user's message that is a text")
        if not self.tells_tools:
            messages = as_text(messages)
            messages = with_tools(messages, tools) if tools else messages
            tools = ()
        return self._apply([self._reasoned(m) for m in messages], tools, cue=cue)

    def encode(self, text: str) -> list[int]:
        """Tokenise text of `render`; special tokens in words of users and tools are plain text.

        Else what a tool reads out could end its turn and begin one of the system.
        """
        ids: list[int] = []
        for number, part in enumerate(_QUOTED.split(text)):
            how = {"add_special_tokens": False, "split_special_tokens": number % 2 == 1}
            ids += self._tokenizer(part, **how)["input_ids"]
        return ids

    def turn_text(
        self, turn: Message, tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, str, str]:
        """Return the text before `turn`, the turn, and its end token."""
        whole = self.render([_USER, turn], tools, cue=False)
        prompt = self.render([_USER], tools)
        while not whole.startswith(prompt):  # the cue is not what it writes before this turn
            prompt = prompt[:-1]
        text = whole[len(prompt) :]
        ends = [(text.rfind(stop), stop) for stop in self._stops if stop in text]
        position, stop = max(ends, default=(len(text), ""))
        return prompt, text[:position], stop

    # -- trying -----------------------------------------------------------------------------------

    def _find(
        self, roles: tuple[str, ...], calls: int, system: bool, tools: bool
    ) -> bool | TurnsError:
        """Return whether the model's turn, its reasoning included, stays as it was sampled.

        If not, the template changes it afterwards (drops its reasoning, mostly), and appending does
        not. A TurnsError: such tails can't be appended. The tail's messages have these
        `roles`, `calls` tools were called before them; it began with `system` and `tools`, or not.
        """
        opening = [{"role": "system", "content": "UMBRARULES"}, _USER] if system else [_USER]
        schemas = [_SCHEMA] if tools else []
        try:
            cues, _ = self._try(roles, calls, opening, schemas, "")
            cues_with_thoughts, thoughts = self._try(
                roles, calls, opening, schemas, self.reasoning_field
            )
        except TurnsError as error:
            return error
        # A cue that ends the reasoning at once fits only a turn that has none.
        return thoughts if cues_with_thoughts else cues

    def _try(
        self,
        roles: tuple[str, ...],
        count: int,
        history: list[Message],
        tools: list[dict[str, Any]],
        field: str,
    ) -> tuple[bool, bool]:
        """Go on from `history`; the model calls `count` tools, and `field` has its reasoning.

        Return whether later prompts keep the cue before the model's turns, and whether they keep
        its reasoning. Raises TurnsError if they change anything else of earlier turns.
        """
        after = "a message of role " + " and ".join(map(repr, roles))
        spoken = self.encode(self.render(history, tools))
        cues = thoughts = True
        for number in range(_ROUNDS):
            said = _said(number, _calls(count), field)
            calls = said.get("tool_calls", ())
            words = [f"{_HEARD}{number}N{index}E" for index in range(len(roles))]
            answers = [{"role": r, "content": word} for r, word in zip(roles, words, strict=True)]
            answers = _addressed(answers, calls)
            before = self.encode(self.render(history, tools, cue=False))
            text, tail = self.tail(answers, calls)
            for role, word in zip(roles, words, strict=True):
                _, found, text = text.partition(word)
                if not found:
                    turn = "a tool call" if count else "an assistant's message"
                    raise self._fault(f"drops a message of role {role!r} after {turn}")
            history = [*history, said, *answers]
            rendered = self.render(history, tools)
            whole = self.encode(rendered)
            if whole[-len(tail) :] != tail:
                raise self._fault(
                    f"writes {after} otherwise in a longer conversation than in a short one"
                )
            own = whole[: -len(tail)]
            if own[: len(spoken)] != spoken:
                cues = False
                if before != own[: len(before)] or before != spoken[: len(before)]:
                    raise self._fault(f"changes earlier messages when {after} follows")
            if field and any(_thought(n) not in rendered for n in range(number + 1)):
                thoughts = False
            spoken = whole
        return cues, thoughts

    def tail(
        self, messages: Sequence[Message], calls: Sequence[dict[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Return text and tokens from a model's turn with `calls` to its next one.

        `messages` are between the two; the tokens begin with the turn's end token. Raises
        TurnsError if the template writes no such turn, or does not end it.
        """
        turn = _said(0, calls)
        rest = self.render([_USER, turn, *_addressed(messages, calls)])
        for index in range(max(1, len(calls))):
            _, mark, rest = rest.partition(_mark(0, index))
            if not mark:
                many = f"{len(calls)} tool calls in one turn"
                raise self._fault(
                    f"does not write {many if calls else 'earlier assistant messages'}"
                )
        ends = [(rest.find(stop), stop) for stop in self._stops if stop in rest]
        if not ends:
            raise self._fault(
                f"ends an assistant's turn by {rest.partition(_HEARD)[0][:40]!r}, in which "
                "there is no token that ends the model's turns here "
                f"({', '.join(map(repr, self._stops))}); if one does, name it in "
                "sampling.stop_tokens"
            )
        position, stop = min(ends)
        rest = rest[position + len(stop) :]
        return rest, self.encode(stop + rest)

    def _reasoned(self, message: Message) -> Message:
        """Move the reasoning of `message` to where this template looks for it."""
        fields = _given(message)
        if self.reasoning_field == "reasoning_content":
            return fields
        thought = fields.pop("reasoning_content", "")
        if message["role"] != "assistant" or not thought:
            return fields
        if self.reasoning_field == "content":
            said = fields.get("content") or ""
            return {**fields, "content": f"<think>\n{thought}\n</think>\n\n{said}"}
        return {**fields, self.reasoning_field: thought}

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, cue: bool
    ) -> str:
        try:
            # Marks special tokens in what a user or a tool says; `encode` reads the marks.
            quoted = [
                {**_quote(m, _MARKS if m["role"] in _TRUSTED else self._special), "role": m["role"]}
                for m in messages
            ]
            with _time_limit():
                return self._tokenizer.apply_chat_template(
                    quoted,
                    tools=_quote(list(tools), self._special) or None,
                    tokenize=False,
                    add_generation_prompt=cue,
                    **self._options,
                )
        except _TooLongError:
            raise UsageError(
                f"{self.name} writes no conversation within {RENDER_S:g} s: end its loops, or name "
                "another one in model.chat_template"
            ) from None
        except Exception as error:
            if type(error).__name__ == "TemplateSyntaxError":  # of jinja2, imported where it is met
                raise UsageError(
                    f"{self.name} is no Jinja template: line {getattr(error, 'lineno', '?')}: "
                    f"{error}; correct it, or name another one in model.chat_template"
                ) from error
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise self._fault(f"fails on messages of roles {roles}: {error}") from error


class _TooLongError(BaseException):
    """Rendering took too long; templates catch no exceptions of this kind."""


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _TooLongError in the block after `RENDER_S` seconds: a template is a program."""
    global _watch
    with _lock:
        _due[threading.get_ident()] = time.monotonic() + RENDER_S
        if not _watch.is_alive():  # one for each block would take longer than most of them
            _watch = threading.Thread(target=_interrupt, name="umbra-templates", daemon=True)
            _watch.start()
    try:
        yield
    finally:
        with _lock:
            _due.pop(threading.get_ident(), None)


_lock = threading.Lock()
_due: dict[int, float] = {}  # when the block of a thread has taken too long
_watch = threading.Thread()


def _interrupt() -> None:
    """Interrupt blocks that take too long; end when there is none, so that nothing wakes idly."""
    global _watch
    raised = ctypes.py_object(_TooLongError)
    while True:
        time.sleep(RENDER_S / 20)
        with _lock:
            if not _due:
                _watch = threading.Thread()
                return
            for thread in [thread for thread, due in _due.items() if due < time.monotonic()]:
                del _due[thread]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token by which a chat template ends an assistant's turn, or None.

    Of several without text between them it is the last: some end an answer before the turn.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [_USER, {"role": "assistant", "content": _HEARD}]
    try:
        with _time_limit():
            text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except (Exception, _TooLongError):  # noqa: BLE001 - a prompt that it fails on says so
        return None
    if _HEARD not in text:
        return None
    special, end = _special_tokens(tokenizer), None
    for token in tokenizer(text.rpartition(_HEARD)[2], add_special_tokens=False)["input_ids"]:
        text_of_token = tokenizer.decode([token])
        if text_of_token in special:
            end = token
        elif text_of_token.strip() or end is not None:
            break
    return end


def _special_tokens(tokenizer: Any) -> set[str]:
    added = tokenizer.added_tokens_decoder.values()
    return {token.content for token in added if token.special}


def with_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Put a system message first that describes the tools and how to call them."""
    described = "\n".join(json.dumps(tool) for tool in tools)
    text = (
        f"You may call these tools:\n<tools>\n{described}\n</tools>\n"
        'Call one by writing <tool_call>{"name": ..., "arguments": {...}}</tool_call>. '
        "Answer in plain text when you know the answer."
    )
    if messages and messages[0].get("role") == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls and answers of tools as plain text, for templates that know neither.

    Answers to one turn are one message, since many templates want users and models to alternate.
    """
    plain: list[Message] = []
    answering = False
    for message in messages:
        if message.get("role") == "tool":
            text = f"<tool_response>{message['content']}</tool_response>"
            if answering:
                text = f"{plain.pop()['content']}\n{text}"
            plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [{key: f[key] for key in ("name", "arguments")} for f in functions]
            text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            words = message.get("content") or ""
            plain.append({"role": message["role"], "content": words + text})
        else:
            plain.append(message)
        answering = message.get("role") == "tool"
    return plain


# The conversation to try templates with, in which every word is marked.


def _mark(number: int, index: int) -> str:
    return f"UMBRASAID{number}N{index}E"


def _thought(number: int) -> str:
    return f"UMBRATHOUGHT{number}E"


def _calls(count: int) -> list[dict[str, Any]]:
    return [tool_call(TOOL, {}, f"call{index:05d}") for index in range(count)]


def _said(number: int, calls: Sequence[dict[str, Any]], field: str = "") -> Message:
    """Return a turn of the model, words or calls, with reasoning in `field` of the message."""
    turn: Message = {"role": "assistant", "content": "" if calls else _mark(number, 0)}
    for index, call in enumerate(calls):
        function = {**call["function"], "arguments": {"mark": _mark(number, index)}}
        turn.setdefault("tool_calls", []).append({**call, "function": function})
    if field == "content":
        turn["content"] = f"<think>\n{_thought(number)}\n</think>\n\n{turn['content']}"
    elif field:
        turn[field] = _thought(number)
    return turn


def _quote(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub("\ue000\\g<0>\ue001", value)
    if isinstance(value, dict):
        return {key: _quote(item, pattern) for key, item in value.items()}
    return [_quote(item, pattern) for item in value] if isinstance(value, list) else value


def _given(message: Message) -> Message:
    """Return `message` without keys that have no value: templates ask whether a key is there."""
    fields = {key: value for key, value in message.items() if value is not None}
    return {**fields, "content": ""} if "content" in message and "content" not in fields else fields


def _addressed(messages: Sequence[Message], calls: Sequence[dict[str, Any]]) -> list[Message]:
    """Add to every tool's answer the name and id of its call; templates need either.

    An answer that names no call belongs to the next one in order.
    """
    by_id = {call.get("id"): call for call in calls}
    order = iter(calls)
    addressed: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            following = next(order, None)
            if call := by_id.get(message.get("tool_call_id"), following):
                names = {"name": call["function"]["name"], "tool_call_id": call.get("id")}
                message = {**names, **_given(message)}
        addressed.append(message)
    return addressed
