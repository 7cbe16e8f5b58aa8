"""Tools as agents declare them: functions, namespaces of functions, and what isn't the client's."""

import json
from typing import Any

from umbra.proto.records import Sampling
from umbra.services.environments.protocol import Turn
from umbra.services.generator.agents.calls import Answer, Call, CallRules
from umbra.services.generator.agents.chat_api import Completions
from umbra.services.generator.agents.messages_api import Messages
from umbra.services.generator.agents.responses_api import Responses
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

RULES = CallRules(Sampling())
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
    reader = ResponseTemplateParser("told", TOLD, told=True)
    ids = list(range(len(said)))
    turn = Turn(reader.read("", said, call.tools), ids, [-0.5] * len(ids), list(said), 7, True, 3)
    answer = Answer.of(turn, call, 0)
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


def test_a_tool_that_is_not_the_clients_is_left_out() -> None:
    rules = CallRules(Sampling())
    assert respond(rules, tools=[SEARCH, ADD]).tools == respond(tools=[ADD]).tools
    assert rules.overruled == {"tools": 1}


def test_the_same_for_messages() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "add"}]
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    body = json.dumps({**asked, "tools": tools}).encode()
    call = Messages.call(body, RULES)
    assert [tool["function"]["name"] for tool in call.tools] == ["add"]


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


def test_what_client_libraries_carry_along_is_no_part_of_a_message() -> None:
    said = {"role": "assistant", "content": "so", "provider_specific_fields": {"refusal": None}}
    body = json.dumps({"messages": [{"role": "user", "content": "go"}, said]}).encode()
    assert Completions.call(body, RULES).messages[1] == {"role": "assistant", "content": "so"}
