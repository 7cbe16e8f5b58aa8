"""Sessions whose agents change their history: where a request goes on from, and who waits."""

from __future__ import annotations

from typing import Any

import pytest

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import RefusedError, StepResult, Turn
from umbra.services.environments.time_limits import TimeLimits
from umbra.services.generator.agents.calls import Answer, Call
from umbra.services.generator.agents.responses_api import response_id
from umbra.services.generator.agents.session import AgentSession
from umbra.services.generator.agents.session_tree import News
from umbra.services.http import ApiError
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser

TIMEOUT_S = 10.0
LIMITS = TimeLimits.of(EnvironmentConfig(kind="agent", timeout_s=TIMEOUT_S))
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class BranchingAgent:
    """Asks a session that may branch; keeps what the model is asked and what agents are told."""

    def __init__(self) -> None:
        self.session = AgentSession("session", "key", {}, LIMITS, branches=True)
        self.session.begin(0.0)
        self.news: list[News] = []
        self.told: list[str] = []

    def ask(self, *messages: Message, repeated: bool = False, **fields: Any) -> None:
        def hear(answer: Answer | ApiError) -> None:
            text = answer.code if isinstance(answer, ApiError) else answer.message["content"]
            self.told.append(text or "")

        call = Call(list(messages), **fields)
        self.session.ask(call, hear, self.news.append, repeated=repeated)

    def hear(self, text: str) -> None:
        parser = ResponseTemplateParser("told", TOLD, told=True)
        turn = Turn(parser.read("", text, [{}]), [1], [0.0], [], 4, True, 0)
        self.session.answered(turn, 1.0)

    def talk(self, *messages: Message, **fields: Any) -> News:
        """Ask, and be told the number of the turn; what the model was asked."""
        self.ask(*messages, **fields)
        number = self.session.turns
        self.hear(f"t{number}")
        assert self.told[-1] == f"t{number}"
        return self.news[-1]


@pytest.fixture
def branching() -> BranchingAgent:
    return BranchingAgent()


def test_an_edit_goes_on_from_the_last_turn_before_it(branching: BranchingAgent) -> None:
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


def test_turns_behind_an_edit_are_text(branching: BranchingAgent) -> None:
    """The chat template writes them, whole, as the agent has them."""
    line = [user("a")]
    for number in range(2):
        branching.talk(*line)
        line += [said(f"t{number}"), user(f"go {number}")]
    trimmed = [*line[:2], user("g."), *line[3:]]
    assert branching.talk(*trimmed) == News(trimmed)
    assert branching.talk(*trimmed, said("t2"), user("on")) == News([user("on")], after=2)


def test_compaction_begins_anew_behind_what_is_kept(branching: BranchingAgent) -> None:
    line = [system("help"), user("a")]
    for number in range(3):
        branching.talk(*line)
        line += [said(f"t{number}"), user("go")]
    compact = [*line[:2], user("so far: much"), user("go")]
    assert branching.talk(*compact) == News(compact)
    compact += [said("t3"), user("go")]
    assert branching.talk(*compact) == News([user("go")], after=3)


def test_a_sub_agent_talks_between_the_turns_of_its_caller(branching: BranchingAgent) -> None:
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


def test_parallel_calls_are_answered_one_after_another(branching: BranchingAgent) -> None:
    branching.talk(user("a"))
    known = [user("a"), said("t0")]
    for name in "bcd":
        branching.ask(*known, user(name))
    assert branching.news[1:] == [News([user("b")], after=0)], "the others wait"
    branching.session.refused(RefusedError("no room", "context_length_exceeded"), 2.0)
    assert branching.news[2:] == [News([user("c")], after=0)]
    assert branching.session.deadline == float("inf"), "the model has something to say"
    branching.hear("to c")
    branching.hear("to d")
    assert branching.told[1:] == ["context_length_exceeded", "to c", "to d"]
    assert not branching.session.asking
    assert branching.session.deadline == 1.0 + TIMEOUT_S
    assert branching.session.turns == 3
    assert branching.talk(*known, user("d"), said("to d"), user("e")).after == 2


def test_the_same_call_twice_is_two_branches_and_repeated_it_is_one(
    branching: BranchingAgent,
) -> None:
    branching.ask(user("a"))
    branching.ask(user("a"))
    branching.ask(user("b"))
    branching.ask(user("b"), repeated=True)  # while it waits
    for text in ("one", "two", "three"):
        branching.hear(text)
    assert branching.news == [News([user("a")]), News([user("a")]), News([user("b")])]
    assert branching.told == ["one", "two", "three", "three"]
    branching.ask(user("b"), repeated=True)
    assert branching.told[-1] == "three"
    assert branching.session.turns == 3
    # Answers tell the two apart.
    assert branching.talk(user("a"), said("one"), user("c")).after == 0
    assert branching.talk(user("a"), said("two"), user("c")).after == 1


def test_plain_text_goes_on_from_the_longest_text(branching: BranchingAgent) -> None:
    branching.ask(text="x ")
    branching.hear("y")
    branching.ask(text="x y z ")
    branching.hear("!")
    branching.ask(text="x y w")
    branching.hear("?")
    branching.ask(text="x y z !!")
    assert branching.news == [
        News(text="x "),
        News(text=" z ", after=0),
        News(text=" w", after=0),
        News(text="!", after=1),
    ]


def test_any_response_may_be_followed(branching: BranchingAgent) -> None:
    branching.talk(user("a"))
    branching.talk(user("b"))
    news = branching.talk(user("c"), follows=response_id("session", 0))
    assert news == News([user("c")], after=0)
    with pytest.raises(ApiError, match="not that of a response of this session"):
        branching.ask(user("d"), follows=response_id("session", 7))
    assert not branching.session.asking


def test_the_end_comes_to_all_who_wait(branching: BranchingAgent) -> None:
    for name in "abc":
        branching.ask(user(name))
    branching.session.rewarded(StepResult(reward=1.0))
    branching.hear("to a")
    assert branching.told == ["to a", "rewarded", "rewarded"]
    assert not branching.session.asking, "so that the reward is delivered"
    other = BranchingAgent()
    for name in "abc":
        other.ask(user(name))
    other.session.end(ApiError("over", status=410, code="session_over"))
    assert other.told == ["session_over"] * 3
