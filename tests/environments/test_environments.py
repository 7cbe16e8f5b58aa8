"""Ready-made environments, those with tools included, and the loader."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.built_in import Guess
from umbra.services.environments.loading import load_environment, runs_inline
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import (
    EpisodeOutcome,
    Opening,
    ParsedTurn,
    Response,
    Row,
    StepResult,
    schema,
)
from umbra.services.environments.tools import ToolUse, calculator

USER_CODE = """
def length(prompt, completion, row):
    return len(completion) / row["most"]
class Echo:
    def __init__(self, turns=2):
        self.turns = turns
    async def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    async def step(self, response):
        raise NotImplementedError
class Half:
    def reset(self, row):
        return []
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> None:
    """Write a module of a user's, MODULE, into the working directory."""
    (tmp_path / "MODULE.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)


def outcome_of(pool: InlinePool, row: Row, *responses: str) -> EpisodeOutcome:
    pool.play("s", {"prompt": "p", **row}, [*responses])
    (outcome,) = pool.collect()
    return outcome


def test_guess_gives_hints_until_a_hit_or_the_last_try() -> None:
    environment = Guess()
    environment.reset({"prompt": "guess", "answer": "6"})
    for said, hint in (("3", ">"), ("9", "<"), ("x", "?")):
        result = environment.step(said)
        assert (result.done, result.messages[0]["content"]) == (False, hint)
    assert environment.step("6") == StepResult(reward=1.0)
    environment.reset({"prompt": "guess", "answer": "6"})
    results = [environment.step("1") for _ in range(4)]
    assert [r.done for r in results] == [False, False, False, True]
    assert (results[-1].reward, results[-1].reason) == (0.0, "turns")


@pytest.mark.usefixtures("user_module")
def test_a_reward_function_from_a_file_in_the_working_directory() -> None:
    environment = load_environment(EnvironmentConfig(kind="reward", reward="MODULE:length"))()
    environment.reset({"prompt": "p", "most": 10})
    assert environment.step("abcd") == StepResult(reward=0.4)


@pytest.mark.parametrize(
    ("kind", "reward", "options", "says"),
    [
        ("exakt", "", {}, "did you mean 'exact'"),
        ("reward", "", {}, "needs environment.reward"),
        ("reward", "MODULE", {}, 'write it as "module:name"'),
        ("reward", "MODULE:lenght", {}, "no callable 'lenght'; did you mean 'length'"),
        ("reward", "MODULEX:length", {}, "did you mean 'MODULE'"),
        ("MODULE:Half", "", {}, "has no method step"),
        ("MODULE:Echo", "", {"turnz": 3}, "environment.options do not fit"),
        ("numeric", "", {"tolerance": -1}, "tolerance must be 0 or more"),
        ("tools", "", {"tools": "calculator"}, "must be a list of calculator"),
        ("tools", "", {"tools": ["calculater"]}, "did you mean 'calculator'"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_usage_errors(kind: str, reward: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_environment(EnvironmentConfig(kind=kind, reward=reward, options=options))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "response", "answer", "reward"),
    [
        ("exact", " 4\n", 4, 1.0),  # stripped text
        ("exact", "5", 4, 0.0),
        ("numeric", "so it is 1,234.", "1234", 1.0),  # the last number
        ("numeric", "7 or 8", 7, 0.0),
        ("numeric", "-2.50", "-2.5", 1.0),
        ("numeric", "1e3", 1000, 1.0),
        ("math", "thus $\\boxed{\\frac{1}{2}}$", "\\frac{2}{4}", 1.0),  # equal forms
        ("math", "0.5", "\\frac{2}{4}", 1.0),
        ("math", "0.6", "\\frac{2}{4}", 0.0),
    ],
)
def test_answers_are_compared(kind: str, response: str, answer: Any, reward: float) -> None:
    pool = InlinePool(load_environment(EnvironmentConfig(kind=kind)))
    outcome = outcome_of(pool, {"answer": answer}, response)
    assert isinstance(outcome.value, StepResult), outcome.error
    assert outcome.value.reward == reward


def test_only_what_is_ours_and_quick_runs_inline() -> None:
    inline = {"exact": True, "guess": True, "tools": True, "math": False, "reward": False}
    assert {kind: runs_inline(EnvironmentConfig(kind=kind)) for kind in inline} == inline
    assert not runs_inline(EnvironmentConfig(kind="tools", options={"tools": ["mine:search"]}))
    assert not runs_inline(EnvironmentConfig(kind="mine:World"))


class Opens:
    """Opens a conversation with what the row has of it."""

    def reset(self, row: Row) -> Opening:
        return Opening(row["messages"], row["tools"])

    def step(self, response: str) -> StepResult:
        raise NotImplementedError


USER = {"role": "user", "content": "go"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_what_no_template_can_write_fails_the_sample() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    parts = [{"type": "text", "text": "x"}]
    texts = [[{**USER, "content": content}] for content in (None, 5, parts)]
    for messages, tools, says in (
        ([USER, CALLED], [tool], ""),
        *((wrong, [], "whose contents are texts") for wrong in (*texts, [{**USER, 1: 2}], USER)),
        ([{"role": "user"}], [], "whose contents are texts"),
        ([USER], None, "reset gave tools None"),
        ([USER], [{"name": "f"}], "instead of schemas"),
    ):
        outcome = outcome_of(InlinePool(Opens, "mine"), {"messages": messages, "tools": tools})
        assert says in outcome.error
        assert (outcome.value is None) == bool(says)


# -- tools: calls, answers to the model, schemas ---------------------------------------------------


def call(expression: Any, name: str = "calculator", argument: str = "expression") -> ParsedTurn:
    function = {"name": name, "arguments": {argument: expression}}
    return ParsedTurn(text="called", tool_calls=[{"type": "function", "function": function}])


def step(environment: ToolUse, said: ParsedTurn | str) -> StepResult:
    return asyncio.run(environment.step(Response.of(said)))


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 +", "is not an arithmetic expression"),
        ("__import__('os')", "is not arithmetic"),
        ("9**9**9", "the power is too large"),
        ("(-8)**0.5", "not a real number"),
        ("'a'*3", "is not arithmetic"),
        ("1" * 300, "longer than"),
    ],
)
def test_the_calculator_calculates_or_refuses(expression: str, says: str) -> None:
    assert calculator("(1-2)**3 + 1e3 % 7 + 3*4 - 7/2") == "13.5"
    assert calculator(" -7 // 2 ") == "-4"
    with pytest.raises(ValueError, match=says.replace("*", "[*]")):
        calculator(expression)


def test_a_tool_is_called_and_its_answer_goes_back() -> None:
    environment = ToolUse()
    opening = environment.reset({"prompt": "2+3?", "answer": "5"})
    assert isinstance(opening, Opening)
    assert opening.tools == [schema(calculator)]
    result = step(environment, call("2+3"))
    assert (result.done, result.reward) == (False, 0.0)
    assert result.messages == [{"role": "tool", "content": "5"}]
    assert step(environment, "It is 5.") == StepResult(reward=1.0)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (call("3", name="search"), "there is no tool 'search', only calculator"),
        (call("3", argument="text"), "missing a required argument: 'expression'"),
        (call("1/0"), "calculator: division by zero"),
        (call(3), "calculator: "),
        (ParsedTurn(text="x", content="x", problem="it is not closed"), "it is not closed"),
    ],
)
def test_a_wrong_call_costs_a_turn_and_nothing_else(response: ParsedTurn, says: str) -> None:
    environment = ToolUse(calls=2)
    environment.reset({"prompt": "2+3?", "answer": "5"})
    result = step(environment, response)
    assert result.messages[0]["content"].startswith("error: ")
    assert says in result.messages[0]["content"]
    assert result.reward_parts == {"tool_calls": 1.0, "malformed_calls": 1.0}
    last = step(environment, response)
    assert (last.done, last.reason, last.reward) == (True, "turns", 0.0)


def test_a_schema_says_what_a_function_takes() -> None:
    def search(query: str, limit: int = 3, *, exact: bool = False) -> str:
        """Find documents.

        More words.
        """
        return query * limit * exact

    given = {"type": "function", "function": {"name": "other"}}
    opening = Opening([], [search, given])
    assert opening.tools == [schema(search), given]
    assert schema(search)["function"] == {
        "name": "search",
        "description": "Find documents.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
            },
            "required": ["query"],
        },
    }
