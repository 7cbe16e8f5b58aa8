"""Text to tokens and back. Text is tokenised once; what the model said is never tokenised again."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config import ModelConfig
from umbra.services.environments.protocol import Message, Opening, Said
from umbra.services.modeling.chat_template import (
    ChatTemplate,
    Kind,
    TailFinding,
    TurnsError,
    end_of_turn,
)
from umbra.services.modeling.parser_choice import choose_parser
from umbra.services.modeling.parsers import (
    PLAIN,
    Parser,
    Piece,
    Reading,
    Tools,
    feed_slowly,
    read,
)

_PLAIN = Opening([])  # no system message, no tools
_CACHED_CHARS = 16_384  # what tools read out may be long, and is not read twice
_CUE_TOKENS = 256  # at the end of a prompt, in which a template may have begun the model's turn
_BROKEN = "\ufffd"  # what an incomplete character decodes to
_SPARE = 8  # tokens before those that may hold a stop string, for characters of several tokens


log = logging.getLogger(__name__)


class Chat:
    """A tokenizer and its chat template, used so that turns can be concatenated token by token.

    Args:
        tokenizer: a Hugging Face tokenizer; one without a chat template takes plain-text prompts.
        stop_ids: the tokens that end a model's turn.
        options: more variables of the template (`model.chat_template_kwargs`).
        parser: name of what reads turns, as in `model.parser`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Iterable[int],
        options: Mapping[str, Any] | None = None,
        parser: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._template: ChatTemplate | None = None
        if tokenizer.chat_template is not None:
            self._template = ChatTemplate(tokenizer, self.stop_ids, options)
        self._parser = parser
        # The samples of a group have one prompt, and environments say few different things.
        self._prompt = functools.lru_cache(maxsize=4096)(self._encode_prompt)
        self._tail = functools.lru_cache(maxsize=4096)(self._encode_tail)
        self._piece = functools.lru_cache(maxsize=4096)(self._decode_piece)
        self._ending = functools.lru_cache(maxsize=64)(self.text)

    @classmethod
    def configured(cls, config: ModelConfig, tokenizer: Any, stop_ids: Iterable[int]) -> Chat:
        """The chat of the run's model, with the chat template that `config` names.

        Raises:
            UsageError: the file of the template can't be read, or there is no such parser.
        """
        if config.chat_template:
            try:
                text = Path(config.chat_template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"model.chat_template: {config.chat_template} cannot be read: {error}"
                ) from error
            tokenizer.chat_template = text
            if (end := end_of_turn(tokenizer)) not in (None, *stop_ids):
                log.warning(
                    "model.chat_template ends turns by %r, which ends no generation: name it in "
                    "sampling.stop_tokens",
                    tokenizer.decode([end]),
                )
        chat = cls(tokenizer, stop_ids, config.chat_template_kwargs, config.parser)
        if chat._template is not None and config.chat_template:
            chat._template.name = f"the chat template {config.chat_template}"
        log.info("the model's turns are read by parser %s", chat.parser.name)
        return chat

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of the first turn, up to where the assistant begins to speak.

        A template that knows no tools has them described in a system message instead.

        Raises:
            UsageError: several messages for a tokenizer that has no chat template, or a template
                that does not write them.
        """
        texts = json.dumps(list(messages)), json.dumps(list(tools))
        short = sum(map(len, texts)) <= _CACHED_CHARS
        return list((self._prompt if short else self._encode_prompt)(*texts))

    def turn_ids(
        self,
        messages: Sequence[Message],
        last_token: int,
        calls: Sequence[dict[str, Any]] = (),
        opening: Opening = _PLAIN,
    ) -> list[int]:
        """Tokens that the environment adds between a model's turn and its next one.

        They are what the template writes after an assistant's message when `messages` follow it.

        Args:
            messages: what the environment says.
            last_token: the last one of the model's turn: its end token is not repeated.
            calls: the tools that were called in that turn, as chat templates take them; many
                templates write an answer differently, or not at all, without its call.
            opening: how the conversation began.

        Raises:
            UsageError: appended tokens would not be what the template writes for the whole
                conversation; says what is in the way.
        """
        template = self._needs_template()
        told = calls if template.writes_calls else ()
        roles = tuple(str(message.get("role")) for message in messages)
        self._require(template.find(_kind(roles, len(told), opening)))
        text = json.dumps([list(messages), list(told)])
        ids = (self._tail if len(text) <= _CACHED_CHARS else self._encode_tail)(text)
        return list(ids[1:] if ids[0] == last_token else ids)

    def check_turns(self, roles: Sequence[str], opening: Opening = _PLAIN) -> bool:
        """Whether all of a model's turn is still there, in the template's eyes, after `roles`.

        If not, the template drops something of it, most often its reasoning, which stays in the
        tokens of the conversation. With "tool" among the roles, the turn called that many tools.

        Raises:
            UsageError: the conversation can't be continued by messages of these roles.
        """
        template = self._needs_template()
        calls = roles.count("tool") if template.writes_calls else 0
        found = template.find(_kind(tuple(roles), calls, opening))
        self._require(found)
        return found.exact

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @functools.cached_property
    def parser(self) -> Parser:
        """What reads the model's turns.

        Raises:
            UsageError: `model.parser` names none, or one that this machine does not have.
        """
        return choose_parser(self._parser, self._tokenizer, self._template)

    def cannot_fit(self, given: Any, tokens: int) -> bool:
        """Return whether the texts in `given` (lists, objects) must have more than `tokens` tokens.

        It counts characters against the longest token, before anything is templated or tokenized.
        """
        return _characters(given) > tokens * self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def text_ids(self, text: str, *, begins: bool) -> list[int]:
        """Tokenise plain text, without a template; one that `begins` has the tokenizer's BOS."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        opening = self._opening if begins else []
        return ids if ids[: len(opening)] == opening else [*opening, *ids]

    @functools.cached_property
    def _opening(self) -> list[int]:
        """What the tokenizer puts before a text: its BOS, if it adds one."""
        bare: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole: list[int] = self._tokenizer("a")["input_ids"]
        return whole[: whole.index(bare[0])]

    def piece(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self._piece(token)

    def said(
        self,
        token_ids: Sequence[int],
        before: Sequence[int] = (),
        tools: Tools = (),
        stops: Sequence[str] = (),
        *,
        words: bool = False,
    ) -> Said:
        """What the model said in one turn.

        Args:
            token_ids: the turn, with the token that ended it if there is one.
            before: the tokens before it, of which the last few matter.
            tools: those that the model was told of.
            stops: texts that end a turn; they are no part of what was said.
            words: whether all of it is words, as in a conversation without a chat template.
        """
        ids, stop = self.split_stop(token_ids)
        text, found = cut(self._decode(ids), stops)
        parser = PLAIN if words else self.parser
        said = read(parser, self._cue(before), text, tools, stop)
        return replace(said, stop=found) if found else said

    def begin(self, before: Sequence[int], tools: Tools, *, words: bool = False) -> Reading:
        """Read a turn while it is made; arguments as of `said`."""
        return (PLAIN if words else self.parser).begin(self._cue(before), tools)

    def split_stop(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Split a turn into its tokens and the text of its end token, or ""."""
        if token_ids and token_ids[-1] in self.stop_ids:
            return list(token_ids[:-1]), self.piece(token_ids[-1])
        return list(token_ids), ""

    def pieces(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode all of `token_ids`, special tokens included, for people to read."""
        return self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not self.parser.marked,
            clean_up_tokenization_spaces=False,
        )

    def _decode_piece(self, token: int) -> str:
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _cue(self, before: Sequence[int]) -> str:
        return self._ending(tuple(before[-_CUE_TOKENS:]))

    def _encode_prompt(self, text: str, tools_text: str) -> tuple[int, ...]:
        messages: list[Message] = json.loads(text)
        if self._template is None:
            if len(messages) != 1:
                raise UsageError(
                    f"{self._tokenizer.name_or_path} has no chat template: prompts must be text"
                )
            return tuple(self.text_ids(messages[0]["content"], begins=True))
        try:
            return tuple(
                self._template.encode(self._template.render(messages, json.loads(tools_text)))
            )
        except TurnsError as error:
            raise UsageError(f"{self._template.name} {error}") from error

    def _encode_tail(self, text: str) -> tuple[int, ...]:
        template = self._needs_template()
        messages, calls = json.loads(text)
        try:
            return tuple(template.tail(messages, calls))
        except TurnsError as error:
            raise UsageError(f"{template.name} {error}") from error

    def _needs_template(self) -> ChatTemplate:
        if self._template is None:
            raise UsageError(
                f"{self._tokenizer.name_or_path} has no chat template, which an environment of "
                "several turns needs"
            )
        return self._template

    def _require(self, found: TailFinding) -> None:
        if found.refusal:
            raise UsageError(f"{self._needs_template().name} {found.refusal}")


class StopSearch:
    """Looks for stop strings in a turn while it is made.

    A token is decoded with those before it that may hold a part of a stop string, and never again.
    """

    def __init__(self, chat: Chat, stops: Sequence[str]) -> None:
        self._chat = chat
        self._stops = stops
        self._window = max(len(stop.encode()) for stop in stops) + _SPARE
        self._tail: list[int] = []
        self.seen = 0
        self.end: int | None = None

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take the next tokens of the turn; return how many of all end with the first stop string.

        None if there is none.
        """
        if self.end is None and token_ids and self._found([*self._tail, *token_ids]):
            tail = self._tail
            for count, token in enumerate(token_ids, 1):
                tail = [*tail, token][-self._window :]
                if self._found(tail):
                    self.end = self.seen + count
                    break
        self.seen += len(token_ids)
        self._tail = [*self._tail, *token_ids][-self._window :]
        return self.end

    def _found(self, token_ids: list[int]) -> bool:
        text = self._chat.pieces(token_ids)
        return any(stop in text for stop in self._stops)


class TurnReader:
    """Reads a turn while the model speaks, token by token; arguments as of `Chat.said`."""

    def __init__(
        self,
        chat: Chat,
        before: Sequence[int],
        tools: Tools,
        stops: Sequence[str] = (),
        *,
        words: bool = False,
    ) -> None:
        self._chat = chat
        self._reading = chat.begin(before, tools, words=words)
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._read: list[int] = []  # the tokens before those that are not read yet
        self._unread: list[int] = []
        self._text = ""  # all of it
        self._fed = 0  # characters of it that were passed on

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return the new pieces, now that the turn has `token_ids` more."""
        self._unread += token_ids
        text = self._news(self._unread)
        if not text or text.endswith(_BROKEN):
            return []
        self._text += text
        self._read, self._unread = self._unread, []
        # A stop string may have begun.
        return self._pass_on(len(self._text) - self._held)

    def end(self, token_ids: Sequence[int]) -> Said:
        """Return the whole turn, which is over with `token_ids` more."""
        ids, stop = self._chat.split_stop([*self._unread, *token_ids])
        self._text, found = cut(self._text + self._news(ids), self._stops)
        self._pass_on(len(self._text))
        return replace(self._reading.end(stop), stop=found)

    def _news(self, token_ids: list[int]) -> str:
        """Return the text that `token_ids` add to what was read."""
        known = self._chat.pieces(self._read)
        return self._chat.pieces([*self._read, *token_ids])[len(known) :]

    def _pass_on(self, end: int) -> list[Piece]:
        new = self._text[self._fed : end]
        if not new:
            return []
        self._fed += len(new)
        return feed_slowly(self._reading, new)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return `text` up to the first of `stops`, and that one, or ""."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(found, default=(len(text), ""))
    return text[:at], stop


def _characters(given: Any) -> int:
    if isinstance(given, dict):
        given = given.values()
    elif isinstance(given, str) or not isinstance(given, list | tuple):
        return len(given) if isinstance(given, str) else 0
    return sum(map(_characters, given))


def _kind(roles: tuple[str, ...], calls: int, opening: Opening) -> Kind:
    first = opening.messages[0] if opening.messages else {}
    return Kind(roles, calls, first.get("role") == "system", bool(opening.tools))
