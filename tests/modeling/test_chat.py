"""Text to tokens: its memory, and templates of unusual forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Message
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

USER: list[Message] = [{"role": "user", "content": "how"}]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.mark.parametrize(("length", "times"), [(10, 1), (20_000, 2)])
def test_short_texts_are_tokenised_once(
    tokenizer: Any, length: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of a group have the same; long ones would fill the memory."""
    chat = Chat(tokenizer, {end := tokenizer.eos_token_id})
    chat.check_turns(["user"])  # tries the template once
    template: Any = chat._template
    made: list[str] = []
    for name in ("render", "tail"):
        plain = getattr(template, name)
        monkeypatch.setattr(template, name, lambda *a, n=name, f=plain: (made.append(n), f(*a))[1])
    messages: list[Message] = [{"role": "user", "content": "x" * length}]
    first = chat.prompt_ids(messages)
    first.append(3)  # is the caller's
    assert chat.prompt_ids(messages) == first[:-1]
    assert made == ["render"] * times
    made.clear()
    before = chat.turn_ids(messages, 99)
    assert chat.turn_ids(messages, end) == before[1:], "its end is there already"
    assert before[0] == end and made.count("tail") == times


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('never') }}", "fails on messages of roles user: never"),
        ("{{ messages[0].content[0].text }}", "does not write a user's message that is a text"),
    ],
)
def test_a_template_that_does_not_write_prompts_is_refused(
    tokenizer: Any, template: str, why: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=why):
        Chat(tokenizer, {0}).prompt_ids(USER)


def test_without_a_template_prompts_are_text(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    chat = Chat(tokenizer, {0})
    assert chat.text(chat.prompt_ids(USER)) == "how"
    with pytest.raises(UsageError, match="has no chat template: prompts must be text"):
        chat.prompt_ids([*USER, *USER])
    with pytest.raises(UsageError, match="which an environment of several turns needs"):
        chat.turn_ids(USER, 0)


def test_what_was_said_ends_before_its_stop_token(tokenizer: Any) -> None:
    chat = Chat(tokenizer, {tokenizer.eos_token_id})
    ids = chat.text_ids("how", begins=False)
    assert chat.parse(ids).text == "how"
    assert chat.parse([*ids, tokenizer.eos_token_id]).text == "how"
    assert chat.parse([]).text == ""
    plain = Chat(tokenizer, {ids[-1]})  # a stop token that is ordinary text
    assert plain.parse(ids).text == "ho"
    assert "".join(map(chat.piece, ids)) == "how"
