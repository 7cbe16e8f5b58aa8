"""Tool calls: parsing, answers to the model, scores."""

import asyncio
from typing import Any

import pytest

from umbra.services.environments.protocol import Opening, ParsedTurn, Response, StepResult, schema
from umbra.services.environments.tools import ToolUse, calculator


def call(expression: Any, name: str = "calculator", argument: str = "expression") -> ParsedTurn:
    function = {"name": name, "arguments": {argument: expression}}
    return ParsedTurn(text="called", tool_calls=[{"type": "function", "function": function}])


def step(environment: ToolUse, said: ParsedTurn | str) -> StepResult:
    return asyncio.run(environment.step(Response.of(said)))


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("(1-2)**3", "-1"), ("7/2", "3.5"), (" -7 // 2 ", "-4"), ("1e3 % 7", "6")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 +", "is not an arithmetic expression"),
        ("__import__('os')", "is not arithmetic"),
        ("1/0", "division by zero"),
        ("9**9**9", "the power is too large"),
        ("(-8)**0.5", "not a real number"),
        ("'a'*3", "is not arithmetic"),
        ("1" * 300, "longer than"),
        ("1e308*10**10 + True", "is not arithmetic"),
    ],
)
def test_the_calculator_refuses(expression: str, says: str) -> None:
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


def test_functions_in_an_opening_become_schemas() -> None:
    given = {"type": "function", "function": {"name": "other"}}
    opening = Opening([], [calculator, given])
    assert opening.tools == [schema(calculator), given]
