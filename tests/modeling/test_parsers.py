"""How turns are read: calls, reasoning and broken ones."""

from pathlib import Path
from typing import Any

import pytest
from fakes.chat_templates import chat_tokenizer, weather
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.errors import UsageError
from umbra.services.config import ModelConfig
from umbra.services.environments.protocol import ParsedTurn
from umbra.services.modeling.chat import Chat, StopSearch
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

WEATHER = weather(
    zip={"type": "string", "description": "its code"},
    days={"type": "integer", "description": "from now"},
)
USER = [{"role": "user", "content": "How warm is it?"}]


def read(name: str, text: str, tools: Any = (WEATHER,), **options: Any) -> ParsedTurn:
    chat = Chat(*chat_tokenizer(name), **options)
    prompt = chat.prompt_ids(USER, list(tools))
    return chat.parse(chat.text_ids(text, begins=False), prompt, list(tools))


def arguments(said: ParsedTurn) -> list[Any]:
    return [call["function"]["arguments"] for call in said.tool_calls]


def test_arguments_have_the_types_of_the_tool() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=zip>\n75001\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    assert arguments(read("qwen3_8", f"so</think>\n\n{text}")) == [{"zip": "75001", "days": 3}]


def test_special_tokens_that_mark_calls_are_not_lost() -> None:
    said = read(
        "gemma4_v5", '<|tool_call>call:weather{zip:<|"|>1<|"|>}<tool_call|><|tool_response>'
    )
    assert arguments(said) == [{"zip": "1"}]
    assert said.text.startswith("<|tool_call>")


@given(st.text(max_size=40) | st.sampled_from([" <tool_call>{}</tool_call>", "a<|im_end|>"]))
def test_turns_that_need_no_parser_are_what_it_would_read(text: str) -> None:
    parser = ResponseTemplateParser("told", TOLD, told=True)
    assert parser.plain
    assert parser.read("", text, [], "<|im_end|>") == ParsedTurn(text=text, content=text)


def test_reasoning_that_the_prompt_has_begun() -> None:
    said = read("qwen3_5_think", "hm\n</think>\n\nyes<|im_end|>", ())
    assert (said.reasoning, said.content) == ("hm", "yes")
    cut = read("qwen3_5_think", "hm and", ())
    assert (cut.reasoning, cut.content) == ("hm and", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "weather", "arguments": {}<|im_end|>', "not closed"),
        ('{"name": "weather", "arguments": {}}<|im_end|>', "not closed"),
        ('{"name": "weather", "arguments": {}}', "not closed"),
        ("{]\n</tool_call><|im_end|>", "Expecting property name"),
        ('{"name": "weather", "arguments": 3}\n</tool_call><|im_end|>', "an object"),
        ('{"arguments": {}}\n</tool_call><|im_end|>', "a name and arguments"),
        ("[]\n</tool_call><|im_end|>", "a name and arguments"),
    ],
)
def test_a_broken_call_is_words_and_says_why(text: str, problem: str) -> None:
    said = read("qwen3", f"<think>\nhm\n</think>\n\nWell. <tool_call>\n{text}")
    assert problem in said.problem
    assert (said.tool_calls, said.reasoning) == ([], "hm")
    assert said.content == "Well. <tool_call>\n" + text.removesuffix("<|im_end|>")


XML = (
    "<tool_call>\n<function=weather>\n<parameter=zip>\n%s\n</parameter>\n</function>\n</tool_call>"
)
JSON = '<tool_call>\n{"name": "weather", "arguments": {"zip": "%s"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "call"), [("qwen3", JSON), ("qwen3_5_think", XML), ("qwen3_8", XML)]
)
def test_calls_of_a_turn_are_those_after_its_thinking(name: str, call: str) -> None:
    one, two = call % 1, call % 2
    begun = "<think>\n" if name == "qwen3" else ""  # else the prompt has it
    after = f"{begun}hm\n</think>\n\n"
    said = read(name, f"{after}{one}\n{two}<|im_end|>")
    assert (arguments(said), said.problem) == ([{"zip": "1"}, {"zip": "2"}], "")
    inside = read(name, f"{begun}hm {one}\n</think>\n\nyes<|im_end|>")
    assert (inside.tool_calls, inside.content) == ([], "yes")
    assert "weather" in inside.reasoning
    for cut in range(two.index("weather"), len(two)):
        broken = read(name, f"{after}{one}\n{two[:cut]}<|im_end|>")
        assert broken.tool_calls == [] and broken.problem, two[:cut]
        assert broken.content == f"{one}\n{two[:cut]}"


def test_without_tools_nothing_is_a_call() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    said = read("qwen3", f"{call}<|im_end|>", ())
    assert (said.tool_calls, said.content, said.problem) == ([], call, "")


@given(
    words=st.text("ab. \né", max_size=12),
    stops=st.lists(st.sampled_from(["b.", "a\n", "é", "ab.ab", " "]), min_size=1, max_size=2),
    size=st.integers(1, 5),
)
def test_a_stop_string_is_found_at_its_first_token(words: str, stops: list[str], size: int) -> None:
    chat = Chat(*chat_tokenizer("qwen3"))
    ids = chat.text_ids(words, begins=False)
    search = StopSearch(chat, stops)
    for at in range(0, len(ids), size):
        search.feed(ids[at : at + size])
    end = search.end
    first = next(
        (n for n in range(1, len(ids) + 1) if any(s in chat.pieces(ids[:n]) for s in stops)), None
    )
    assert end == first
    if end is not None:
        said = chat.parse(ids[:end], (), (), stops)
        assert said.stop in stops
        assert not any(stop in said.content for stop in stops)
        assert words.startswith(said.content + said.stop)


def test_a_parser_is_named() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    assert read("qwen3", call, parser="none").tool_calls == []
    assert arguments(read("qwen3", call, parser="qwen3")) == [{}]
    for parser, why in (
        ("hermes", "use auto, none, qwen3, "),
        ("vllm/nobody", "model.parser = vllm/nobody"),
    ):
        with pytest.raises(UsageError, match=why):
            Chat(*chat_tokenizer("qwen3"), parser=parser).parser  # noqa: B018


def test_a_model_may_bring_its_own_response_template() -> None:
    tokenizer, stops = chat_tokenizer("qwen3")
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {"open_pattern": r"@(?P<name>\w+)", "close": ";", "content": "json", "repeats": True}
    calls["transform"] = {"type": "function", "function": function}
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": calls, "content": {"content": "text"}},
    }
    chat = Chat(tokenizer, stops)
    ids = chat.text_ids('@weather{"days": 1};<|im_end|>', begins=False)
    said = chat.parse(ids, chat.prompt_ids(USER, [WEATHER]), [WEATHER])
    assert arguments(said) == [{"days": 1}]


def test_variables_and_files_of_chat_templates(tmp_path: Path) -> None:
    tokenizer, stops = chat_tokenizer("qwen3")
    thinks = Chat.configured(ModelConfig(), tokenizer, stops)
    quick = ModelConfig(chat_template_kwargs={"enable_thinking": False})
    told = Chat.configured(quick, tokenizer, stops)
    assert thinks.text(thinks.prompt_ids(USER)).endswith("assistant\n")
    assert told.text(told.prompt_ids(USER)).endswith("<think>\n\n</think>\n\n")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}!{% endfor %}")
    own = Chat.configured(ModelConfig(chat_template=str(file)), tokenizer, stops)
    assert own.text(own.prompt_ids(USER)) == "How warm is it?!"
    with pytest.raises(UsageError, match=r"model\.chat_template: .*none cannot be read"):
        Chat.configured(ModelConfig(chat_template=str(tmp_path / "none")), tokenizer, stops)
