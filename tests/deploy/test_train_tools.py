"""`umbra.train(tools=...)`: functions of a program become tools of the model."""

import asyncio
from typing import Any

import pytest

import umbra
from umbra.deploy.python.source import CopiedSource
from umbra.deploy.python.train import _with_tools
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import Opening, ParsedTurn, Response, StepResult


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def keys(environment: dict[str, Any], *tools: umbra.Tool | str) -> dict[str, Any]:
    return _with_tools(environment, tools, CopiedSource())


def test_they_are_offered_and_called() -> None:
    given = keys({"options": {"calls": 3}}, double, "calculator")
    assert given["options"]["calls"] == 3
    environment: Any = load_environment(EnvironmentConfig(**given))()
    opening: Opening = environment.reset({"prompt": "twice 21?", "answer": "42"})
    offered = {tool["function"]["name"]: tool["function"] for tool in opening.tools}
    assert list(offered) == ["double", "calculator"]
    assert offered["double"]["description"] == "Twice a number."
    assert offered["double"]["parameters"]["properties"] == {"number": {"type": "integer"}}
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": 21}}}
    said = ParsedTurn(text="a call", content="", tool_calls=[call])
    answer: StepResult = asyncio.run(environment.step(Response.of(said)))
    assert (answer.done, answer.messages[0]["content"]) == (False, "42")
    assert asyncio.run(environment.step(Response.of("42"))).reward == 1.0


def test_another_environment_has_its_own() -> None:
    for kind in ("guess", "mine:Environment"):
        with pytest.raises(umbra.UsageError, match="leave out environment"):
            keys({"kind": kind}, double)
    with pytest.raises(umbra.UsageError, match="a lambda has no name"):
        keys({}, lambda number: 2 * number)
