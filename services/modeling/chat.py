"""Text to tokens and back. Text is tokenised once; what the model said is never tokenised again."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message, Opening
from umbra.services.modeling.chat_template import ChatTemplate, Finding, Kind, TurnsError

_PLAIN = Opening([])  # no system message, no tools
_CACHED_CHARS = 16_384  # what tools read out may be long, and is not read twice


class Chat:
    """A tokenizer and its chat template, used so that turns can be concatenated token by token.

    Args:
        tokenizer: a Hugging Face tokenizer; one without a chat template takes plain-text prompts.
        stop_ids: the tokens that end a model's turn.
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._template: ChatTemplate | None = None
        if tokenizer.chat_template is not None:
            self._template = ChatTemplate(tokenizer, self.stop_ids)
        # The samples of a group have one prompt, and environments say few different things.
        self._prompt = functools.lru_cache(maxsize=4096)(self._encode_prompt)
        self._tail = functools.lru_cache(maxsize=4096)(self._encode_tail)

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

    def call_text(self, name: str, arguments: dict[str, Any]) -> str | None:
        """How the template writes a call, as `response_text` gives it; None if it writes none."""
        template = self._needs_template()
        try:
            text = template.call_text(name, arguments)
        except TurnsError as error:
            raise UsageError(f"{template.name} {error}") from error
        return None if text is None else self.response_text(self._encode(text))

    def text_ids(self, text: str) -> list[int]:
        """Tokens of plain text, without a template."""
        return list(self._encode(text))

    def piece(self, token: int) -> str:
        """The text of one token, special or not."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def response_text(self, token_ids: Sequence[int]) -> str:
        """What the model said in one turn, without the stop token and other special tokens."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """All of `token_ids` as text, special tokens included, for people to read."""
        return self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def _encode_prompt(self, text: str, tools_text: str) -> tuple[int, ...]:
        messages: list[Message] = json.loads(text)
        if self._template is None:
            if len(messages) != 1:
                raise UsageError(
                    f"{self._tokenizer.name_or_path} has no chat template: prompts must be text"
                )
            return self._encode(messages[0]["content"])
        try:
            return self._encode(self._template.render(messages, json.loads(tools_text)))
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

    def _require(self, found: Finding) -> None:
        if found.refusal:
            raise UsageError(f"{self._needs_template().name} {found.refusal}")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _kind(roles: tuple[str, ...], calls: int, opening: Opening) -> Kind:
    first = opening.messages[0] if opening.messages else {}
    return Kind(roles, calls, first.get("role") == "system", bool(opening.tools))
