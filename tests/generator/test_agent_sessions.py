"""Sessions of agents: what continues a conversation and what does not; who gets which sample."""

import math
from dataclasses import replace
from typing import Any

import pytest

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import RefusedError, StepResult, Turn
from umbra.services.environments.time_limits import TimeLimits
from umbra.services.generator.agents.calls import Answer, Call
from umbra.services.generator.agents.session import AgentSession, SessionRegistry
from umbra.services.generator.agents.session_tree import News
from umbra.services.http import ApiError
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

TIMEOUT_S = 10.0
LIMITS = TimeLimits.of(EnvironmentConfig(kind="agent", timeout_s=TIMEOUT_S))


def turn(text: str) -> Turn:
    said = ResponseTemplateParser("told", TOLD, told=True).read("", text, [{}])
    return Turn(said, [1], [0.0], [], 4, True, 0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Agent:
    """Asks a session, and keeps what it is told."""

    def __init__(self, *, branches: bool = False) -> None:
        self.session = AgentSession("id", "key", {}, LIMITS, branches=branches)
        self.session.begin(0.0)
        self.told: list[Answer | ApiError] = []
        self.news: list[News] = []  # what the model was asked

    def ask(self, *messages: dict[str, Any], repeated: bool = False, **fields: Any) -> News | None:
        """What the model is asked for it, if it is at once."""
        call, before = Call(list(messages), **fields), len(self.news)
        self.session.ask(call, self.told.append, self.news.append, repeated=repeated)
        return self.news[-1] if len(self.news) > before else None

    def hear(self, text: str, now: float = 1.0, *, stop: str = "") -> Any:
        heard = turn(text)
        self.session.answered(replace(heard, said=replace(heard.said, stop=stop)), now)
        answer = self.told.pop()
        assert isinstance(answer, Answer)
        return answer.message


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_a_history_that_grows_gives_only_what_is_new(agent: Agent) -> None:
    assert agent.ask(user("a")) == News([user("a")])
    answer = agent.hear("b")
    assert agent.ask(user("a"), answer, user("c")) == News([user("c")], after=0)
    agent.hear("d")
    # White space around a message is no edit: the tokens are those that were sampled.
    news = agent.ask(user("a"), said("b"), user("c "), said("\nd"), user("e"), user("f"))
    assert news == News([user("e"), user("f")], after=1)


def test_what_stopped_a_turn_may_come_back_behind_it(agent: Agent) -> None:
    """The reply is without it, but some agents write it again: its tokens have it."""
    agent.ask(user("a"))
    agent.hear("<code>b\n", stop="</code>")
    back = said("<code>b\n</code>")
    assert agent.ask(user("a"), back, user("c")) == News([user("c")], after=0)
    agent.hear("<code>d", stop="</code>")
    ends = said("<code>d")
    assert agent.ask(user("a"), back, user("c"), ends, user("e")) == News([user("e")], after=1)
    agent.hear("f")
    with pytest.raises(ApiError, match=r"messages\[5\] is not what it was"):
        agent.ask(user("a"), back, user("c"), ends, user("e"), said("f</code>"), user("g"))


def test_a_tools_answer_comes_with_the_calls_that_it_answers(agent: Agent) -> None:
    tools = [{"function": {"name": "add"}}]
    agent.ask(user("a"), tools=tools)
    message = agent.hear('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    answer = {"role": "tool", "tool_call_id": "call_0_0", "content": "2"}
    # As they come back over HTTP, where `read_message` has made objects of the arguments.
    back = {**message, "content": "", "tool_calls": [dict(call) for call in message["tool_calls"]]}
    function = {"name": "add", "arguments": {"a": 1}}
    back["tool_calls"][0]["function"] = function
    news = agent.ask(user("a"), back, answer, tools=tools)
    call = {"id": "call_0_0", "type": "function", "function": function}
    assert news == News([answer], [call], after=0)


def test_plain_text_goes_on_where_it_ended(agent: Agent) -> None:
    assert agent.ask(text="one") == News(text="one")
    agent.hear(" two")
    assert agent.ask(text="one two three") == News(text=" three", after=0)
    agent.hear("!")
    for text in ("one two", "one two three!"):
        with pytest.raises(ApiError, match="does not continue"):
            agent.ask(text=text)
    with pytest.raises(ApiError, match="the other of chat completions"):
        agent.ask(user("a"))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user("x"), said("b"), user("c")], r"messages\[0\] is not what it was"),
        ([user("a"), said("x"), user("c")], r"messages\[1\] is not what it was"),
        ([user("a"), user("c")], r"messages\[1\] is not what it was"),
        ([user("a"), said("b")], "has 2 entries and needs more than the 2"),
        ([user("a")], "has 1 entries and needs more than the 2"),
    ],
)
def test_an_edited_history_is_refused_and_changes_nothing(
    agent: Agent, messages: list[dict[str, Any]], says: str
) -> None:
    agent.ask(user("a"))
    agent.hear("b")
    with pytest.raises(ApiError, match=says) as caught:
        agent.ask(*messages)
    assert (caught.value.code, caught.value.status) == ("history_edited", 400)
    assert agent.ask(user("a"), said("b"), user("c")) == News([user("c")], after=0)


def test_other_tools_are_another_prompt(agent: Agent) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    agent.ask(user("a"), tools=tools)
    agent.hear("b")
    with pytest.raises(ApiError, match="tools are not those"):
        agent.ask(user("a"), said("b"), user("c"))


def test_a_repeated_call_gets_the_same_reply(agent: Agent) -> None:
    agent.ask(user("a"))
    assert agent.ask(user("a"), repeated=True) is None  # while the model speaks
    agent.session.answered(turn("b"), 1.0)
    first, second = agent.told
    assert first is second
    assert agent.ask(user("a"), repeated=True) is None  # and afterwards
    assert agent.told[2] is first
    assert agent.session.turns == 1
    # A client that repeats a call which never came through asks for the first time.
    assert agent.ask(user("a"), said("b"), user("c"), repeated=True) == News([user("c")], after=0)


def test_one_request_at_a_time(agent: Agent) -> None:
    agent.ask(user("a"))
    with pytest.raises(ApiError, match="one by one") as caught:
        agent.ask(user("b"))
    assert caught.value.status == 400


def test_a_refused_call_leaves_the_conversation_as_it_was(agent: Agent) -> None:
    agent.ask(user("a"))
    agent.hear("b")
    agent.ask(user("a"), said("b"), user("long"))
    agent.session.refused(RefusedError("too long", "context_length_exceeded"), 2.0)
    (error,) = agent.told
    assert isinstance(error, ApiError)
    assert (error.code, str(error)) == ("context_length_exceeded", "too long")
    assert agent.session.refusal == "too long"
    assert agent.ask(user("a"), said("b"), user("c")) == News([user("c")], after=0)


def test_a_reward_ends_it_once(agent: Agent) -> None:
    with pytest.raises(ApiError, match="nothing to reward"):
        agent.session.rewarded(StepResult(reward=1.0))
    agent.ask(user("a"))
    agent.hear("b")
    agent.session.rewarded(StepResult(reward=1.0))
    agent.session.rewarded(StepResult(reward=1.0))  # the same, said twice
    with pytest.raises(ApiError, match="has its reward already: 1"):
        agent.session.rewarded(StepResult(reward=0.0))
    with pytest.raises(ApiError, match="it is over"):
        agent.ask(user("a"), said("b"), user("c"))
    agent.session.end(ApiError("over", status=410))
    agent.session.rewarded(StepResult(reward=1.0))
    with pytest.raises(ApiError, match="over"):
        agent.session.rewarded(StepResult(reward=0.0))


def test_only_the_silence_of_the_agent_counts(agent: Agent) -> None:
    session = agent.session
    assert session.deadline == TIMEOUT_S
    agent.ask(user("a"))
    assert session.deadline == math.inf  # the model's turn
    agent.hear("b", now=100.0)
    assert session.deadline == 100.0 + TIMEOUT_S
    with pytest.raises(ApiError):
        agent.ask(user("x"))
    assert session.deadline == 100.0 + TIMEOUT_S  # nonsense is no sign of life
    session.rewarded(StepResult())
    assert session.deadline == math.inf


def test_samples_are_handed_out_in_order_and_once() -> None:
    names = iter("abcdef")
    registry = SessionRegistry(LIMITS, lambda: next(names))
    for key in ("one", "two", "three"):
        registry.open(key, {"prompt": key})
    registry.close("one")
    assert registry.waiting == 2
    first, second = registry.lease(5.0), registry.lease(5.0)
    assert first is not None
    assert second is not None
    assert (first.key, second.key, registry.lease(5.0)) == ("two", "three", None)
    assert registry.overdue(14.9) == []
    assert registry.overdue(15.0) == [first, second]
    again = registry.open("two", {})  # begun anew: the old session is over
    assert first.over is not None
    assert "began anew" in str(first.over)
    assert registry.find(first.id) is first
    assert registry.of("two") is again
    with pytest.raises(ApiError) as caught:
        registry.find("nobody")
    assert caught.value.status == 404


def test_whoever_waits_is_told_that_it_is_over() -> None:
    registry = SessionRegistry(LIMITS)
    session = registry.open("one", {})
    told: list[Answer | ApiError] = []
    session.ask(Call([user("a")]), told.append, lambda _: None)
    registry.close_all("the generator stops")
    (error,) = told
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (410, "session_over")
    assert "the generator stops" in str(error)
