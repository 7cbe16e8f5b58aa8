"""Worked examples as token sequences in which what the assistant said is learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from umbra.proto.errors import UsageError
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.process.files import read_jsonl

Message = dict[str, str]


class Demonstrations:
    """Conversations, each tokenised once; batches are drawn from them.

    Args:
        conversations: lists of `{"role": ..., "content": ...}`.
        tokenizer: a fast tokenizer with a chat template.

    Raises:
        UsageError: no chat template, or one whose text for a conversation does not begin with its
            text for the first messages of it.
    """

    def __init__(
        self, conversations: Sequence[list[Message]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if not tokenizer.is_fast or tokenizer.chat_template is None:
            raise UsageError("the model needs a fast tokenizer with a chat template")
        texts: list[str] = []
        spans: list[list[tuple[int, int]]] = []
        for messages in conversations:
            text, learned = _render(messages, tokenizer)
            texts.append(text)
            spans.append(learned)
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        self._ids: list[Tensor] = [torch.tensor(ids) for ids in encoded["input_ids"]]
        self._learned: list[Tensor] = [
            torch.tensor(
                [
                    index
                    for index, (start, _) in enumerate(offsets)
                    if index and any(low <= start < high for low, high in learned)
                ],
                dtype=torch.int64,
            )
            for offsets, learned in zip(encoded["offset_mapping"], spans, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, which: Sequence[int]) -> Tokens:
        lengths = torch.tensor([len(self._ids[i]) for i in which])
        starts = (lengths.cumsum(0) - lengths).tolist()
        learned = [self._learned[i] + start for i, start in zip(which, starts, strict=True)]
        counts = torch.tensor([len(positions) for positions in learned])
        return Tokens(
            ids=torch.cat([self._ids[i] for i in which]),
            lengths=lengths,
            learned=torch.cat(learned),
            owner=torch.arange(len(which)).repeat_interleave(counts),
        )


def read_conversations(path: str | Path) -> list[list[Message]]:
    """The conversations in a JSONL file of `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Raises:
        UsageError: unreadable, or a row that is not of that form; it names the row.
    """
    conversations: list[list[Message]] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise UsageError(
                f'{path}, row {number}: needs "messages", a list of {{"role": ..., "content": ...}}'
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise UsageError(f"{path}, row {number}: no message of the assistant to learn from")
        conversations.append(messages)
    return conversations


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _render(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and the character ranges of it that the assistant said."""

    def text_of(count: int, ask: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=ask
        )
        assert isinstance(text, str)
        return text

    text = text_of(len(messages), False)
    learned: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text_of(index, True)
        after = text if index + 1 == len(messages) else text_of(index + 1, False)
        if not (text.startswith(after) and after.startswith(before)):
            raise UsageError("the chat template rewrites earlier turns: it can't be learned from")
        learned.append((len(before), len(after)))
    return text, learned
