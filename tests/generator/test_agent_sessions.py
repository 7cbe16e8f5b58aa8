"""Calls of agents and their sessions: which are accepted, continue or branch, and who waits."""

import json
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest

from umbra.proto.records import Sampling
from umbra.services.environments.protocol import (
    Ask,
    EpisodeOutcome,
    ParsedTurn,
    RefusedError,
    StepResult,
    Turn,
)
from umbra.services.generator.agents.calls import Answer, Call, CallRules, response_id
from umbra.services.generator.agents.protocols import Completions, Messages, Responses
from umbra.services.generator.agents.session import AgentSession, SessionRegistry
from umbra.services.http import ApiError
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

RULES = CallRules(Sampling(temperature=0.7, top_k=20), ["<|end|>"])
TIMEOUT_S = 10.0
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
Message = dict[str, Any]


def turn(text: str, *, complete: bool = True, tools: Any = TOOLS, stop: str = "") -> Turn:
    ids = list(range(len(text)))
    parsed = ResponseTemplateParser("told", TOLD, told=True).read("", text, tools)
    parsed = replace(parsed, stop=stop)
    return Turn(parsed, ids, [-0.5] * len(ids), list(text), 7, complete, 3)


def tool_call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass
class News:
    """The part of an `Ask` that depends on what was said before."""

    messages: list[Message]
    calls: list[Any] = field(default_factory=list)
    after: int | None = None


class Agent:
    """Asks a session; keeps what the model is asked and what the agent is told."""

    def __init__(self, *, branches: bool = False) -> None:
        self.news: list[News] = []
        self.told: list[Any] = []  # messages, or codes of errors

        def deliver(outcome: EpisodeOutcome) -> None:
            assert outcome.key == "key" and isinstance(outcome.value, Ask)
            self.news.append(News(outcome.value.messages, outcome.value.calls, outcome.value.after))

        own = "session", "key", {}, TIMEOUT_S, deliver, Mock()
        self.session = AgentSession(*own, branches=branches)
        self.session.begin(0.0)

    def ask(self, *messages: Message, repeated: bool = False, **fields: Any) -> News | None:
        """Return the request to the model, if there is one at once."""
        before = len(self.news)
        answer = self.session.ask(Call(list(messages), **fields), repeated=repeated)
        answer.add_done_callback(lambda done: self.told.append(self._told(done)))
        return self.news[-1] if len(self.news) > before else None

    @staticmethod
    def _told(done: Any) -> Any:
        error = done.exception()
        return error.code if isinstance(error, ApiError) else done.result().message

    def hear(self, text: str, now: float = 1.0, *, stop: str = "") -> Any:
        self.session.answered(turn(text, stop=stop), now)
        return self.told[-1]

    def talk(self, *messages: Message, **fields: Any) -> News:
        """Ask, and be told the number of the turn; what the model was asked."""
        self.ask(*messages, **fields)
        number = self.session.turns
        assert self.hear(f"t{number}") == said(f"t{number}")
        return self.news[-1]


@pytest.fixture
def agent() -> Agent:
    """One that has asked "a" and been told "b"."""
    made = Agent()
    made.ask(user("a"))
    made.hear("b")
    return made


@pytest.fixture
def branching() -> Agent:
    return Agent(branches=True)


def test_a_history_that_grows_gives_only_what_is_new(agent: Agent) -> None:
    assert agent.news == [News([user("a")])]
    assert agent.ask(user("a"), said("b"), user("c")) == News([user("c")], after=0)
    agent.hear("d")
    # White space around a message is no edit: the tokens are those that were sampled.
    news = agent.ask(user("a"), said("b"), user("c "), said("\nd"), user("e"), user("f"))
    assert news == News([user("e"), user("f")], after=1)


def test_what_stopped_a_turn_may_come_back_behind_it() -> None:
    """The reply is without it, but some agents write it again: its tokens have it."""
    agent = Agent()
    agent.ask(user("a"))
    agent.hear("<code>b\n", stop="</code>")
    back = said("<code>b\n</code>")
    assert agent.ask(user("a"), back, user("c")) == News([user("c")], after=0)
    agent.hear("f")
    with pytest.raises(ApiError, match=r"messages\[3\] was changed"):
        agent.ask(user("a"), back, user("c"), said("f</code>"), user("g"))


def test_a_tools_answer_comes_with_the_calls_that_it_answers() -> None:
    agent = Agent()
    agent.ask(user("a"), tools=TOOLS)
    message = agent.hear(tool_call("add"))
    answer = {"role": "tool", "tool_call_id": "call_0_0", "content": "2"}
    news = agent.ask(user("a"), message, answer, tools=TOOLS)
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"id": "call_0_0", "type": "function", "function": function}
    assert news == News([answer], [call], after=0)


def test_an_edited_history_or_a_refused_call_changes_nothing(agent: Agent) -> None:
    short = "with the model's last answer the session has 2"
    for messages, says in (
        ([user("x"), said("b"), user("c")], r"messages\[0\] was changed"),
        ([user("a"), said("x"), user("c")], r"messages\[1\] was changed"),
        ([user("a"), said("b")], f"has 2 entries; {short}"),
        ([user("a")], f"has 1 entries; {short}"),
    ):
        with pytest.raises(ApiError, match=says) as caught:
            agent.ask(*messages)
        assert (caught.value.code, caught.value.status) == ("history_edited", 400)
    with pytest.raises(ApiError, match="tools differ from the first"):
        agent.ask(user("a"), said("b"), user("c"), tools=TOOLS)
    agent.ask(user("a"), said("b"), user("long"))
    agent.session.answered(RefusedError("too long", "context_length_exceeded"), 2.0)
    assert agent.told[-1] == "context_length_exceeded"
    assert agent.session.refusal == "too long"
    assert agent.ask(user("a"), said("b"), user("c")) == News([user("c")], after=0)


def test_a_repeated_call_gets_the_same_reply() -> None:
    agent = Agent()
    first = agent.session.ask(Call([user("a")]))
    assert agent.session.ask(Call([user("a")]), repeated=True) is first  # while the model speaks
    agent.session.answered(turn("b"), 1.0)
    assert agent.session.ask(Call([user("a")]), repeated=True) is first  # and afterwards
    assert agent.session.turns == 1
    # A client that repeats a call which never came through asks for the first time.
    assert agent.ask(user("a"), said("b"), user("c"), repeated=True) == News([user("c")], after=0)
    with pytest.raises(ApiError, match="one by one"):
        agent.ask(user("b"))


def test_a_reward_ends_it_once(agent: Agent) -> None:
    with pytest.raises(ApiError, match="nothing to reward"):
        Agent().session.rewarded(StepResult(reward=1.0))
    agent.session.rewarded(StepResult(reward=1.0))
    agent.session.rewarded(StepResult(reward=1.0))  # the same, said twice
    with pytest.raises(ApiError, match="has its reward already: 1"):
        agent.session.rewarded(StepResult(reward=0.0))
    with pytest.raises(ApiError, match="it is over"):
        agent.ask(user("a"), said("b"), user("c"))
    agent.session.end(ApiError("over", status=410))
    with pytest.raises(ApiError, match="over"):
        agent.session.rewarded(StepResult(reward=0.0))


def test_only_the_silence_of_the_agent_counts() -> None:
    agent = Agent()
    session = agent.session
    assert session.deadline == TIMEOUT_S
    agent.ask(user("a"))
    assert session.deadline == math.inf  # the model's turn
    agent.hear("b", now=100.0)
    with pytest.raises(ApiError):
        agent.ask(user("x"))
    assert session.deadline == 100.0 + TIMEOUT_S  # nonsense is no sign of life
    session.rewarded(StepResult())
    assert session.deadline == math.inf


def test_an_edit_goes_on_from_the_last_turn_before_it(branching: Agent) -> None:
    line = [user("a")]
    for number in range(3):
        branching.talk(*line)
        line += [said(f"t{number}"), user(f"go {number}")]
    edited = [*line[:2], user("another")]
    assert branching.talk(*edited) == News([user("another")], after=0)
    # Both lines go on.
    assert branching.talk(*line) == News([line[-1]], after=2)
    more = [*edited, said("t3"), user("more")]
    assert branching.talk(*more) == News([user("more")], after=3)
    # Turns behind an edit are text: the chat template writes them, whole, as the agent has them.
    trimmed = [*line[:2], user("g."), *line[3:]]
    assert branching.talk(*trimmed) == News(trimmed)
    assert branching.talk(*trimmed, said("t6"), user("on")) == News([user("on")], after=6)


def test_a_sub_agent_talks_between_the_turns_of_its_caller(branching: Agent) -> None:
    caller = [system("plan"), user("a")]
    worker = [system("search"), user("find b")]
    branching.talk(*caller)
    assert branching.talk(*worker, tools=TOOLS) == News(worker)
    worker += [said("t1"), user("further")]
    assert branching.talk(*worker, tools=TOOLS) == News([user("further")], after=1)
    caller += [said("t0"), user("it found c")]
    assert branching.talk(*caller) == News([user("it found c")], after=0)
    # With other tools the prompt is another one, whatever the messages.
    worker += [said("t2"), user("on")]
    assert branching.talk(*worker) == News(worker)


def test_parallel_calls_are_answered_one_after_another(branching: Agent) -> None:
    branching.talk(user("a"))
    known = [user("a"), said("t0")]
    for name in "bcd":
        branching.ask(*known, user(name))
    assert branching.news[1:] == [News([user("b")], after=0)], "the others wait"
    branching.session.answered(RefusedError("no room", "context_length_exceeded"), 2.0)
    assert branching.news[2:] == [News([user("c")], after=0)]
    assert branching.session.deadline == math.inf, "the model has something to say"
    branching.hear("to c")
    branching.hear("to d")
    assert branching.told[1:] == ["context_length_exceeded", said("to c"), said("to d")]
    assert not branching.session.asking
    assert branching.session.deadline == 1.0 + TIMEOUT_S
    assert branching.talk(*known, user("d"), said("to d"), user("e")).after == 2


def test_the_same_call_twice_is_two_branches_and_repeated_it_is_one(branching: Agent) -> None:
    for name in "aab":
        branching.ask(user(name))
    branching.ask(user("b"), repeated=True)  # while it waits
    for text in ("one", "two", "three"):
        branching.hear(text)
    assert branching.news == [News([user(name)]) for name in "aab"]
    assert branching.told == [said(text) for text in ("one", "two", "three", "three")]
    branching.ask(user("b"), repeated=True)
    assert branching.told[-1] == said("three")
    assert branching.session.turns == 3
    # Answers tell the two apart.
    assert branching.talk(user("a"), said("one"), user("c")).after == 0
    assert branching.talk(user("a"), said("two"), user("c")).after == 1


def test_any_response_may_be_followed(branching: Agent) -> None:
    branching.talk(user("a"))
    branching.talk(user("b"))
    news = branching.talk(user("c"), follows=response_id("session", 0))
    assert news == News([user("c")], after=0)
    with pytest.raises(ApiError, match="not that of a response of this session"):
        branching.ask(user("d"), follows=response_id("session", 7))
    assert not branching.session.asking


def test_the_end_comes_to_all_who_wait(branching: Agent) -> None:
    for name in "abc":
        branching.ask(user(name))
    branching.session.rewarded(StepResult(reward=1.0))
    branching.hear("to a")
    assert branching.told == [said("to a"), "rewarded", "rewarded"]
    assert not branching.session.asking, "so that the reward is delivered"
    other = Agent(branches=True)
    for name in "abc":
        other.ask(user(name))
    other.session.end(ApiError("over", status=410, code="session_over"))
    assert other.told == ["session_over"] * 3


def test_samples_are_handed_out_in_order_and_once() -> None:
    registry = SessionRegistry(TIMEOUT_S, Mock(), Mock())
    for key in ("one", "two", "three"):
        registry.open(key, {"prompt": key})
    registry.close("one")
    first, second = registry.lease(5.0), registry.lease(5.0)
    assert first is not None
    assert second is not None
    assert (first.key, second.key, registry.lease(5.0)) == ("two", "three", None)
    assert registry.overdue(14.9) == []
    assert registry.overdue(15.0) == [first, second]
    again = registry.open("two", {})  # restarted: the old session is over
    assert "restarted" in str(first.over)
    assert registry.find(first.id) is first
    assert registry.of("two") is again
    with pytest.raises(ApiError) as caught:
        registry.find("nobody")
    assert caught.value.status == 404
    answer = second.ask(Call([user("a")]))
    registry.close_all("the generator stops")
    error = answer.exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (410, "session_over")
    assert "the generator stops" in str(error)
    assert not registry._waiting


# -- requests for completions, and replies ---------------------------------------------------------


def chat(rules: CallRules = RULES, **fields: Any) -> Call:
    body = {"model": "m", "messages": [user("hi")], **fields}
    return Completions.call(json.dumps(body).encode(), rules)


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
    assert call == Call([user("hi")], TOOLS, max_tokens=5, **asked)


def test_what_a_chat_refuses() -> None:
    for fields, param, says in (
        ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
        ({"n": 2}, "n", "n = 2 is not supported: use 1"),
        ({"system": "hi"}, "system", "system is not supported here: leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use"),
        ({"max_tokens": 0}, "max_tokens", "use 1 or more"),
        ({"messages": []}, "messages", "empty"),
        (asking(content="x"), "messages[0]", "no role"),
        ({"messages": [user("hi"), user(3)]}, "messages[1].content", "text"),
        (asking("user", content=[{"type": "image_url"}]), "messages[0].content", "text"),
        (asking("assistant", tool_calls=[{"id": "x"}]), "messages[0].tool_calls", "malformed"),
        (asking("assistant", function_call={"name": "f"}), "messages[0].function_call", "not sup"),
        ({"tools": [{"name": "add"}]}, "tools", "function"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools", "an object"),
        ({"stop": ["a"] * 65}, "stop", "64 stop strings of 1024 characters"),
        ({"text": {"format": "json"}}, "text.format", 'use {"type":"text"}'),
    ):
        with pytest.raises(ApiError) as caught:
            chat(**fields)  # pyright: ignore[reportArgumentType]
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


def test_reasoning_is_returned_and_taken_back() -> None:
    """With or without it, the history is the same; another one is an edit."""
    agent, call, form = Agent(), Call([user("a")]), Messages("session", "m", 5)
    agent.ask(user("a"))
    heard = replace(turn("yes"), parsed=ParsedTurn(text="", content="yes", reasoning="hm"))
    agent.session.answered(heard, 1.0)
    answer = Answer.of(heard, call, 0)
    whole = Completions("session", "m", 5).whole(call, answer)
    assert whole["choices"][0]["message"]["reasoning_content"] == "hm"
    blocks = form.whole(call, answer)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    history = [user("a"), {"role": "assistant", "content": blocks}, user("b")]
    again = Messages.call(json.dumps({"messages": history}).encode(), RULES).messages
    assert again[1] == {**said("yes"), "reasoning_content": "hm"}
    with pytest.raises(ApiError) as caught:
        agent.ask(user("a"), {**again[1], "reasoning_content": "other"}, user("b"))
    assert "(history_edited)" in form.error(caught.value)["error"]["message"]
    agent.ask(*again)
    agent.hear("no")
    assert agent.ask(user("a"), said("yes"), user("b"), said("no"), user("c")) == News(
        [user("c")], after=1
    )


def test_usage_and_logprobs_are_those_of_the_tokens() -> None:
    call = chat(logprobs=True)
    whole = Completions("session", "m", 5).whole(call, Answer.of(turn("a"), call, 0))
    assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
    assert whole["system_fingerprint"] == "version-3"
    (one,) = whole["choices"][0]["logprobs"]["content"]
    assert (one["token"], one["logprob"], one["bytes"]) == ("a", -0.5, [97])


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
        assert chat(rules, **fields, tool_choice="required") == Call(messages=[user("hi")])
    assert rules.overruled == fields.keys()
    assert len(caplog.records) == len(fields)  # the first time
    for name, value in (("n", 2), ("tool_choice", "none"), ("response_format", {"type": "json"})):
        with pytest.raises(ApiError, match=name):
            chat(rules, **{name: value})


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
    both = tool_call("agents__add") + tool_call("add")
    answer = Answer.of(turn(both, tools=call.tools), call, 0)
    form = Responses("session", "m", 5)
    items = form.whole(call, answer)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("add", "agents"),
        ("add", None),
    ]
    assert '"namespace":"agents"' in form.events(call, answer).decode().replace(" ", "")
    again = respond(input=[user("go"), *items], tools=[ADD, SPACE])
    names = [made["function"]["name"] for made in again.messages[-1]["tool_calls"]]
    assert names == ["agents__add", "add"]


def test_tools_that_are_none_or_that_nothing_reads_are_refused_and_others_left_out() -> None:
    with pytest.raises(ApiError, match=r"no parser reads the tool calls.*model\.parser"):
        chat(CallRules(Sampling(), reads_calls=False), tools=TOOLS)
    for inner in ("add", [1], [{**ADD, "parameters": "x"}]):
        with pytest.raises(ApiError) as caught:
            respond(tools=[{**SPACE, "tools": inner}])
        assert caught.value.param == "tools"
    with pytest.raises(ApiError, match=r"^input\[1\]\.content must be text"):
        respond(input=[user("go"), user([{"type": "input_image"}])])
    rules = CallRules(Sampling())
    assert respond(rules, tools=[SEARCH, ADD]).tools == respond(tools=[ADD]).tools
    assert rules.overruled == {"tools"}


def test_what_the_system_says_first_is_one_message() -> None:
    developer = [{"role": "developer", "content": said} for said in ("two", "three", "four")]
    call = respond(instructions="one", input=[*developer[:2], user("go"), developer[2]])
    assert call.messages == [system("one\n\ntwo\n\nthree"), user("go"), system("four")]
    assert respond(input=[developer[0], user("go")]).messages[0] == system("two")
