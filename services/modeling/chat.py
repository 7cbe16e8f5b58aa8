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
from umbra.services.environments.protocol import Message, Opening, ParsedTurn
from umbra.services.modeling.chat_template import ChatTemplate, TurnsError, end_of_turn
from umbra.services.modeling.parsers import Parser, Tools, choose_parser

_PLAIN = Opening([])  # no system message, no tools
_CACHED_CHARS = 16_384  # what tools read out may be long, and is not read twice
_CUE_TOKENS = 256  # at the end of a prompt, in which a template may have begun the model's turn
_SPARE = 8  # tokens before those that may hold a stop string, for characters of several tokens

log = logging.getLogger(__name__)


class Chat:
    """A tokenizer and its chat template, used so that turns can be concatenated token by token.

    A tokenizer without a chat template takes plain-text prompts. `stop_ids` are the tokens that end
    a model's turn, `options` more variables of the template (`model.chat_template_kwargs`), and
    `parser` the name of what reads turns (`model.parser`).
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
        told = tokenizer.chat_template is not None
        self._template = ChatTemplate(tokenizer, self.stop_ids, options) if told else None
        self._parser = parser
        # The samples of a group have one prompt, and environments say few different things.
        self._prompt = functools.lru_cache(maxsize=4096)(self._encode_prompt)
        self._tail = functools.lru_cache(maxsize=4096)(self._encode_tail)
        self.piece = functools.lru_cache(maxsize=4096)(lambda token: self.text((token,)))
        """The text of one token, special or not."""
        self._ending = functools.lru_cache(maxsize=64)(self.text)

    @classmethod
    def configured(cls, config: ModelConfig, tokenizer: Any, stop_ids: Iterable[int]) -> Chat:
        """Return the chat of the run's model, with the chat template that `config` names.

        Raises UsageError if the file of the template can't be read, or there is no such parser.
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
        """Return the tokens of the first turn, up to where the assistant begins to speak.

        A template that knows no tools has them described in a system message instead.
        """
        texts = json.dumps(list(messages)), json.dumps(list(tools)) if tools else "[]"
        short = sum(map(len, texts)) <= _CACHED_CHARS
        return list((self._prompt if short else self._encode_prompt)(*texts))

    def turn_ids(
        self,
        messages: Sequence[Message],
        last_token: int,
        calls: Sequence[dict[str, Any]] = (),
        opening: Opening = _PLAIN,
    ) -> list[int]:
        """Return the template's text between a model's turn and its next one.

        A TurnsError names the obstacle if appended tokens would differ from the ones that the
        template writes for the whole conversation.

        Args:
            messages: what the environment says.
            last_token: the last one of the model's turn: its end token is not repeated.
            calls: the tools that were called in that turn, as chat templates take them; many
                templates write an answer differently, or not at all, without its call.
            opening: how the conversation began.
        """
        template = self._needs_template()
        tool_calls = calls if template.writes_calls else ()
        roles = tuple(str(message.get("role")) for message in messages)
        self._find(roles, len(tool_calls), opening)
        text = json.dumps([list(messages), list(tool_calls)])
        ids = (self._tail if len(text) <= _CACHED_CHARS else self._encode_tail)(text)
        return list(ids[1:] if ids[0] == last_token else ids)

    def check_turns(self, roles: Sequence[str], opening: Opening = _PLAIN) -> bool:
        """Return whether the template keeps all of a model's turn when messages of `roles` follow.

        If not, it drops something, most often reasoning, which stays in the conversation's tokens.
        With "tool" among the roles, the turn called that many tools.
        """
        calls = roles.count("tool") if self._needs_template().writes_calls else 0
        return self._find(tuple(roles), calls, opening)

    @functools.cached_property
    def parser(self) -> Parser:
        return choose_parser(self._parser, self._tokenizer, self._template)

    def cannot_fit(self, content: Any, tokens: int) -> bool:
        """Return whether the texts in `content` must have more than `tokens` tokens.

        It counts characters against the longest token, before anything is templated or tokenized.
        """
        return _characters(content) > tokens * self._longest_token

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
        """Return the tokens that the tokenizer puts before a text: its BOS, if it adds one."""
        bare: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole: list[int] = self._tokenizer("a")["input_ids"]
        return whole[: whole.index(bare[0])]

    def parse(
        self,
        token_ids: Sequence[int],
        before: Sequence[int] = (),
        tools: Tools = (),
        stops: Sequence[str] = (),
    ) -> ParsedTurn:
        """Read one turn of the model, with the token that ended it if there is one.

        Of the tokens `before` it the last few matter; `tools` are the ones in the model's prompt;
        `stops` are texts that end a turn, and no part of its text.
        """
        ids, stop = token_ids, ""
        if ids and ids[-1] in self.stop_ids:
            ids, stop = ids[:-1], self.piece(ids[-1])
        text, stop_string = _cut(self.pieces(ids), stops)
        parser = self.parser
        if parser.plain and not tools:
            return ParsedTurn(text=text, content=text, stop=stop_string)
        try:
            turn = parser.read(self._ending(tuple(before[-_CUE_TOKENS:])), text, tools, stop)
        except Exception as error:  # noqa: BLE001 - a library's, on whatever a model may say
            log.warning("parser %s failed on a turn: %r", parser.name, error)
            problem = f"the turn cannot be read: {error!r}"
            turn = ParsedTurn(text=text, content=text, problem=problem)
        return replace(turn, stop=stop_string) if stop_string else turn

    def pieces(self, token_ids: Sequence[int]) -> str:
        """Decode a part of a turn, as its parser reads it."""
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not self.parser.marked,
            clean_up_tokenization_spaces=False,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode all of `token_ids`, special tokens included, for people to read."""
        return self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def _encode_prompt(self, text: str, tools_text: str) -> tuple[int, ...]:
        messages: list[Message] = json.loads(text)
        if (template := self._template) is not None:
            return tuple(template.encode(template.render(messages, json.loads(tools_text))))
        if len(messages) != 1:
            raise UsageError(
                f"{self._tokenizer.name_or_path} has no chat template: prompts must be text"
            )
        return tuple(self.text_ids(messages[0]["content"], begins=True))

    def _encode_tail(self, text: str) -> tuple[int, ...]:
        return tuple(self._needs_template().tail(*json.loads(text))[1])

    def _needs_template(self) -> ChatTemplate:
        if self._template is None:
            raise UsageError(
                f"{self._tokenizer.name_or_path} has no chat template, which an environment of "
                "several turns needs"
            )
        return self._template

    def _find(self, roles: tuple[str, ...], calls: int, opening: Opening) -> bool:
        system = bool(opening.messages) and opening.messages[0].get("role") == "system"
        outcome = self._needs_template().find(roles, calls, system, bool(opening.tools))
        if isinstance(outcome, TurnsError):
            raise TurnsError(str(outcome))
        return outcome


class StopSearch:
    """The search for stop strings in a turn while it is made.

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
        """Take tokens of the turn; return how many of all end with a stop string, or None."""
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


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return `text` up to the first of `stops`, and that one, or ""."""
    positions = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(positions, default=(len(text), ""))
    return text[:at], stop


def _characters(content: Any) -> int:
    """Count the characters of all texts, keys included, and one for each other value."""
    if isinstance(content, dict):
        return sum(len(key) + _characters(value) for key, value in content.items())
    if isinstance(content, list | tuple):
        return sum(map(_characters, content))
    return len(content) if isinstance(content, str) else content is not None
