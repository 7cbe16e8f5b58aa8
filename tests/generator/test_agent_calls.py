"""Requests for completions: which are accepted, how others are refused; OpenAI's replies."""

import json
import logging
from typing import Any

import pytest

from umbra.proto.records import Sampling
from umbra.services.environments.protocol import Turn
from umbra.services.generator.agents.calls import Answer, Call, CallRules
from umbra.services.generator.agents.protocols import Completions, Responses
from umbra.services.http import ApiError
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

RULES = CallRules(Sampling(temperature=0.7, top_k=20), ["<|end|>"])
TOOLS = [{"type": "function", "function": {"name": "add"}}]
USER = {"role": "user", "content": "hi"}


def chat(rules: CallRules = RULES, **fields: Any) -> Call:
    body = {"model": "m", "messages": [USER], **fields}
    return Completions.call(json.dumps(body).encode(), rules)


def turn(said: str, *, complete: bool = True, tools: Any = TOOLS) -> Turn:
    pieces = list(said)
    ids = list(range(len(said)))
    reader = ResponseTemplateParser("told", TOLD, told=True)
    return Turn(reader.read("", said, tools), ids, [-0.5] * len(ids), pieces, 7, complete, 3)


def asking(role: str = "", **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **message} if role else message]}


def test_what_agrees_with_the_run_is_served() -> None:
    call = chat(
        temperature=0.7, top_p=1, top_k=20, stop=["<|end|>"], n=1, presence_penalty=0.0, seed=None,
        tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"}, user="me",
        max_tokens=9, max_completion_tokens=5, logprobs=True, stream=True,
        stream_options={"include_usage": True}, tools=TOOLS,
    )  # fmt: skip
    asked: Any = {"logprobs": True, "stream": True, "stream_usage": True}
    assert call == Call([USER], TOOLS, max_tokens=5, **asked)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
        ({"n": 2}, "n", "n = 2 is not supported: use 1"),
        ({"best": 1}, "best", "best is not supported here: leave it out"),
        ({"system": "hi"}, "system", "system is not supported here: leave it out"),
        ({"tool_choice": "none"}, "tool_choice", 'use "auto"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "use"),
        ({"max_tokens": 0}, "max_tokens", "use 1 or more"),
        ({"messages": []}, "messages", "empty"),
        (asking(content="x"), "messages[0]", "no role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content", "text"),
        (asking("user", content=[{"type": "image_url"}]), "messages[0].content", "text"),
        (asking("assistant", tool_calls=[{"id": "x"}]), "messages[0].tool_calls", "malformed"),
        (asking("assistant", function_call={"name": "f"}), "messages[0].function_call", "not sup"),
        ({"tools": [{"name": "add"}]}, "tools", "function"),
        ({"tools": [{"function": {}}]}, "tools", "a function with a name"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools", "an object"),
        ({"stop": ["a"] * 65}, "stop", "64 stop strings of 1024 characters"),
        ({"stop": "a" * 1025}, "stop", "64 stop strings of 1024 characters"),
        ({"text": {"format": "json"}}, "text.format", 'use {"type":"text"}'),
    ],
)
def test_what_a_chat_refuses(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert says in str(caught.value)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == param


def test_messages_are_brought_into_the_form_of_templates() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"text": "good"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ]
    )
    made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert call.messages == [
        {"role": "system", "content": "be good"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]


def tool_call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'


def test_tool_calls_become_objects_only_if_all_are_well_formed() -> None:
    call = chat(tools=TOOLS)
    answer = Answer.of(turn("first " + tool_call("add") + tool_call("sub")), call, 2)
    assert answer.finish_reason == "tool_calls"
    assert answer.message["content"] == "first"
    assert [c["id"] for c in answer.message["tool_calls"]] == ["call_2_0", "call_2_1"]
    assert answer.message["tool_calls"][1]["function"]["arguments"] == {"a": 1}
    for said in (tool_call("add") + "<tool_call>{]</tool_call>", "plain"):
        kept = Answer.of(turn(said), call, 0)
        assert kept.message == {"role": "assistant", "content": said}
        assert kept.finish_reason == "stop"
    untold = Answer.of(turn(tool_call("add"), tools=()), chat(), 0)
    assert untold.message["content"] == tool_call("add")
    assert Answer.of(turn("cut", complete=False), call, 0).finish_reason == "length"


def test_usage_and_logprobs_are_those_of_the_tokens() -> None:
    call = chat(logprobs=True)
    whole = Completions("session", "m", 5).whole(call, Answer.of(turn("ab"), call, 0))
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert whole["system_fingerprint"] == "version-3"
    content = whole["choices"][0]["logprobs"]["content"]
    assert [(c["token"], c["logprob"], c["bytes"]) for c in content] == [
        ("a", -0.5, [97]),
        ("b", -0.5, [98]),
    ]


def test_a_sampling_of_its_own_is_overruled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rules = CallRules(Sampling())
    fields = {
        "temperature": 0.0,
        "top_k": 3,
        "logit_bias": {"5": 1},
        "presence_penalty": 1,
        "seed": 3,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for _ in range(3):
        assert chat(rules, **fields, tool_choice="required") == Call(messages=[USER])
    assert rules.overruled == fields.keys()
    assert len(caplog.records) == len(fields)  # the first time
    for name, value in (("n", 2), ("tool_choice", "none"), ("response_format", {"type": "json"})):
        with pytest.raises(ApiError, match=name):
            chat(rules, **{name: value})


def test_tools_whose_calls_nothing_reads_are_refused() -> None:
    with pytest.raises(ApiError, match=r"no parser reads the tool calls.*model\.parser"):
        chat(CallRules(Sampling(), reads_calls=False), tools=TOOLS)


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS}
SPACE = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [ADD]}
SEARCH = {"type": "web_search", "external_web_access": True}


def respond(rules: CallRules = RULES, **fields: Any) -> Call:
    return Responses.call(json.dumps({"model": "m", "input": "go", **fields}).encode(), rules)


def test_functions_of_a_namespace_have_its_name_for_the_model_and_theirs_for_the_client() -> None:
    call = respond(tools=[ADD, SPACE])
    assert [tool["function"]["name"] for tool in call.tools] == ["add", "agents__add"]
    assert call.tools[1]["function"]["parameters"] == PARAMETERS
    said = '<tool_call>{"name": "agents__add", "arguments": {"a": 1}}</tool_call>'
    said += said.replace("agents__", "")
    answer = Answer.of(turn(said, tools=call.tools), call, 0)
    form = Responses("session", "m", 5)
    items = form.whole(call, answer)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("add", "agents"),
        ("add", None),
    ]
    assert '"namespace":"agents"' in form.events(call, answer).decode().replace(" ", "")
    again = respond(input=[{"role": "user", "content": "go"}, *items], tools=[ADD, SPACE])
    names = [made["function"]["name"] for made in again.messages[-1]["tool_calls"]]
    assert names == ["agents__add", "add"]


@pytest.mark.parametrize("inner", ["add", [1], [{**ADD, "parameters": "x"}]])
def test_tools_of_a_namespace_that_are_none_are_refused(inner: Any) -> None:
    with pytest.raises(ApiError) as caught:
        respond(tools=[{**SPACE, "tools": inner}])
    assert caught.value.param == "tools"


def test_a_tool_that_is_not_the_clients_is_left_out() -> None:
    rules = CallRules(Sampling())
    assert respond(rules, tools=[SEARCH, ADD]).tools == respond(tools=[ADD]).tools
    assert rules.overruled == {"tools"}


def test_what_the_system_says_first_is_one_message() -> None:
    developer = [{"role": "developer", "content": said} for said in ("two", "three", "four")]
    user = {"role": "user", "content": "go"}
    call = respond(instructions="one", input=[*developer[:2], user, developer[2]])
    assert call.messages == [
        {"role": "system", "content": "one\n\ntwo\n\nthree"},
        user,
        {"role": "system", "content": "four"},
    ]
    assert respond(input=[developer[0], user]).messages[0]["content"] == "two"
