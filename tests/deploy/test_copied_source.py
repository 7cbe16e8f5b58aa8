"""Functions of a program as source, with what they use; and as tools of the model."""

import asyncio
import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

import umbra
from umbra.deploy.python.source import MODULE, CopiedSource
from umbra.deploy.python.train import _with_tools
from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import Opening, ParsedTurn, Response, StepResult

FACTOR = 2.5
WORDS = {"good": 1.0, "bad": -1.0}
DIGITS = re.compile(r"\d+", re.IGNORECASE)
HANDLE = object()


def copied(function: Any, folder: Path) -> Any:
    """`function` after it was copied, imported from a file as another process would."""
    source = CopiedSource()
    assert source.target(function, "reward") == f"{MODULE}:{function.__name__}"
    path = folder / f"{MODULE}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function.__name__)


def test_what_lies_in_a_module_is_named_and_not_copied() -> None:
    source = CopiedSource()
    assert source.target(json.loads, "reward") == "json:loads"
    assert source.target(test_what_lies_in_a_module_is_named_and_not_copied, "reward") == (
        f"{__name__}:test_what_lies_in_a_module_is_named_and_not_copied"
    )
    assert source.text == "" and source.copied == []
    assert source.search == [Path(__file__).resolve().parent]

    def uses() -> Any:
        return umbra.UsageError, Counter

    source.target(uses, "reward")  # a module that the copy imports is found by it as well
    assert source.search[1:] == [Path(umbra.__file__).resolve().parents[1]]


def test_a_function_is_copied_with_all_that_it_uses_by_each_of_its_names(tmp_path: Path) -> None:
    offset = 0.25

    def weigh(text: str) -> float:
        return sum(WORDS.get(word, 0.0) for word in text.split())

    alias = weigh

    def score(prompt: str, completion: str, row: "dict[str, Any]") -> float:
        digits = Counter(DIGITS.findall(completion))
        return FACTOR * alias(completion) + math.sqrt(len(digits)) + offset

    again = copied(score, tmp_path)
    for text in ("good 1 2 3", "bad", "", "A1 a1"):
        assert again("", text, {}) == score("", text, {})
    assert again.__module__ == MODULE


def test_a_class_is_copied_with_its_base_and_what_its_methods_use(tmp_path: Path) -> None:
    class Base:
        def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": row["prompt"] * int(FACTOR)}]

    class Echo(Base):
        limit = len(WORDS)

        @staticmethod
        def _worth(text: str) -> float:
            return WORDS.get(text, 0.0)

        def step(self, response: str) -> float:
            return self._worth(response) + super().__class__.__name__.count("E")

    again = copied(Echo, tmp_path)()
    assert again.reset({"prompt": "ab"}) == [{"role": "user", "content": "abab"}]
    assert again.step("good") == Echo().step("good")
    assert again.limit == 2


def test_what_cannot_be_copied_is_refused_with_its_name() -> None:
    def opens(completion: str) -> bool:
        return HANDLE is not None

    def made(worth: float) -> Any:
        def score(completion: str) -> float:
            return worth

        return score

    for function, told in (
        (opens, "'opens' uses 'HANDLE', a object, which cannot be copied"),
        (made(float("inf")), "uses 'worth', a float"),  # which its source would not give back
        (lambda completion: 0.0, "a lambda has no name: write it with def"),
        (3, "is a int; give a function or a class"),
    ):
        with pytest.raises(UsageError, match=told):
            cast(Any, CopiedSource()).target(function, "reward")
    source = CopiedSource()
    source.target(made(1.0), "reward")
    with pytest.raises(UsageError, match="two things are called 'score'"):
        source.target(made(2.0), "reward")


# -- umbra.train(tools=...) ------------------------------------------------------------------------


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def keys(environment: dict[str, Any], *tools: umbra.Tool | str) -> dict[str, Any]:
    return _with_tools(environment, tools, CopiedSource())


def test_functions_are_offered_as_tools_and_called() -> None:
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


def test_another_environment_has_tools_of_its_own() -> None:
    for kind in ("guess", "mine:Environment"):
        with pytest.raises(UsageError, match="leave out environment"):
            keys({"kind": kind}, double)
    with pytest.raises(UsageError, match="a lambda has no name"):
        keys({}, lambda number: 2 * number)
