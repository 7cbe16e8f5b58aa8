"""Tool calls: what is parsed, what the model is told, what is scored."""

import asyncio
from typing import Any

import pytest

from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.environments.tools import (
    ToolCall,
    ToolCallError,
    ToolUse,
    calculator,
    parse_tool_calls,
    schema,
)


def call(expression: Any) -> str:
    arguments = f'{{"name": "calculator", "arguments": {{"expression": {expression}}}}}'
    return f"<tool_call>{arguments}</tool_call>"


def step(environment: ToolUse, response: str) -> StepResult:
    return asyncio.run(environment.step(response))


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


def test_calls_are_parsed_in_order() -> None:
    found = parse_tool_calls("let me see " + call('"1+1"') + " and " + call('"2"'))
    assert found == [
        ToolCall("calculator", {"expression": "1+1"}),
        ToolCall("calculator", {"expression": "2"}),
    ]
    assert parse_tool_calls("the answer is 3") == []


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("<tool_call>{]</tool_call>", "not valid JSON"),
        (f"<tool_call>{'[' * 10_000}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'must be an object with "name"'),
        ('<tool_call>{"name": "x", "arguments": 3}</tool_call>', '"arguments" of the tool call'),
        ('<tool_call>{"name": "x"}', "is not closed"),
    ],
)
def test_a_malformed_call_is_explained(response: str, says: str) -> None:
    (error,) = parse_tool_calls(response)
    assert isinstance(error, ToolCallError)
    assert says in str(error)


def test_a_tool_is_called_and_its_answer_goes_back() -> None:
    environment = ToolUse()
    opening = environment.reset({"prompt": "2+3?", "answer": "5"})
    assert isinstance(opening, Opening)
    assert opening.tools == [schema(calculator)]
    result = step(environment, call('"2+3"'))
    assert (result.done, result.reward) == (False, 0.0)
    assert result.messages == [{"role": "tool", "content": "5"}]
    assert step(environment, "It is 5.") == StepResult(reward=1.0)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (call("3").replace("calculator", "search"), "there is no tool 'search', only calculator"),
        (call("3").replace("expression", "text"), "missing a required argument: 'expression'"),
        (call('"1/0"'), "calculator: division by zero"),
        (call("3"), "calculator: "),
        ("<tool_call>nonsense</tool_call>", "not valid JSON"),
    ],
)
def test_a_wrong_call_costs_a_turn_and_nothing_else(response: str, says: str) -> None:
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
