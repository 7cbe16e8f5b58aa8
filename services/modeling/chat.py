"""Text to tokens and back. Text is tokenised once; what the model said is never tokenised again."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message

_PLACEHOLDER = "UMBRA-PLACEHOLDER"
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
        # The samples of a group have one prompt, and environments say few different things.
        self._prompt = functools.lru_cache(maxsize=4096)(self._encode_prompt)
        self._tail = functools.lru_cache(maxsize=4096)(self._encode_tail)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Tokens of the first turn, up to where the assistant begins to speak.

        A template that knows no tools has them described in a system message instead.

        Raises:
            UsageError: several messages for a tokenizer that has no chat template.
        """
        texts = json.dumps(list(messages)), json.dumps(list(tools))
        short = sum(map(len, texts)) <= _CACHED_CHARS
        return list((self._prompt if short else self._encode_prompt)(*texts))

    def turn_ids(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Tokens that the environment adds between a model's turn and its next one.

        They are what the template writes after an assistant's message when `messages` follow it.
        `last_token` is the last one of the model's turn: its end token is not repeated.
        """
        text = json.dumps(list(messages))
        ids = (self._tail if len(text) <= _CACHED_CHARS else self._encode_tail)(text)
        return list(ids[1:] if ids[0] == last_token else ids)

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
        tools: list[dict[str, Any]] = json.loads(tools_text)
        if self._tokenizer.chat_template is None:
            if len(messages) != 1:
                raise UsageError(
                    f"{self._tokenizer.name_or_path} has no chat template: prompts must be text"
                )
            return self._encode(messages[0]["content"])
        if tools and "tools" not in self._tokenizer.chat_template:
            messages = with_tools(messages, tools)
            tools = []
        return self._encode(self._render(messages, tools))

    def _encode_tail(self, messages: str) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            raise UsageError(
                f"{self._tokenizer.name_or_path} has no chat template, which an environment of "
                "several turns needs"
            )
        history: list[Message] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _PLACEHOLDER},
        ]
        text = self._render([*history, *json.loads(messages)])
        _, found, tail = text.partition(_PLACEHOLDER)
        if not found or not tail:
            raise UsageError(
                f"the chat template of {self._tokenizer.name_or_path} does not write earlier "
                "assistant messages: environments of several turns can't use it"
            )
        return self._encode(tail)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        if "tool" not in self._tokenizer.chat_template:
            messages = [as_user(message) for message in messages]
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=True,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """`messages` after a system message that says what may be called, and how."""
    described = "\n".join(json.dumps(tool) for tool in tools)
    system: Message = {
        "role": "system",
        "content": "You may call these tools:\n"
        f"<tools>\n{described}\n</tools>\n"
        'Call one by writing <tool_call>{"name": ..., "arguments": {...}}</tool_call>. '
        "Answer in plain text when you know the answer.",
    }
    if messages and messages[0].get("role") == "system":
        joined = f"{messages[0]['content']}\n\n{system['content']}"
        return [{"role": "system", "content": joined}, *messages[1:]]
    return [system, *messages]


def as_user(message: Message) -> Message:
    """What a tool said, as templates write it that know no such role."""
    if message.get("role") != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
