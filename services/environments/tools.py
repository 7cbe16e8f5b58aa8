"""Tool use: the model calls functions until it answers in plain text.

The model gets the fault of a call in one sentence, which costs a turn.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from umbra.services.environments.built_in import last_number, same_number
from umbra.services.environments.protocol import (
    Opening,
    Response,
    Row,
    StepResult,
    Tool,
    content_of,
    expected_answer,
    prompt_messages,
)
from umbra.services.environments.sandbox import SandboxTools

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST = 200  # characters
_LARGEST = 1e15  # numbers beyond it are not raised to powers, which could take for ever
_HIGHEST_POWER = 64


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression with + - * / // % ** and parentheses, or ValueError."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    return str(int(value)) if float(value).is_integer() and abs(value) < _LARGEST else f"{value:g}"


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow) and (abs(a) > _LARGEST or abs(b) > _HIGHEST_POWER):
                raise ValueError("the power is too large")
            value = _OPERATORS[type(op)](a, b)
            if not isinstance(value, complex):
                return value
            raise ValueError("the result is not a real number")
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


BUILT_IN: dict[str, Tool] = {"calculator": calculator}


class ToolUse:
    """Answer the row's prompt with the help of tools; reward 1 for the row's "answer".

    The answer is the first response without a tool call: its last number, if the row's answer is
    one (within `tolerance`, relative), else its stripped text. After `calls` turns with calls the
    sample ends without a reward. Tools that are names are tools of `sandbox`.
    """

    def __init__(
        self,
        tools: Sequence[Tool | str] = (calculator,),
        calls: int = 8,
        tolerance: float = 1e-6,
        sandbox: SandboxTools | None = None,
    ) -> None:
        functions = [getattr(sandbox, tool) if isinstance(tool, str) else tool for tool in tools]
        self._tools = {tool.__name__: tool for tool in functions}
        self._sandbox = sandbox
        self._calls, self._tolerance = calls, tolerance

    def reset(self, row: Row) -> Opening:
        self._remaining, self._answer = self._calls, expected_answer(row, "tools")
        return Opening(prompt_messages(row), list(self._tools.values()))

    async def step(self, response: str) -> StepResult:
        assert isinstance(response, Response)
        calls = response.tool_calls
        if not calls and not response.problem:
            return StepResult(reward=float(self._right(response)))
        self._remaining -= 1
        answers = [await self._call(call["function"]) for call in calls]
        if response.problem:  # the turn is text as a whole
            answers = [(f"error: {response.problem}", True)]
        malformed = float(sum(failed for _, failed in answers))
        parts = {"tool_calls": float(len(answers)), "malformed_calls": malformed}
        if self._remaining <= 0:
            return StepResult(reward_parts=parts, reason="turns")
        messages = [{"role": "tool", "content": answer} for answer, _ in answers]
        tool_calls = [{**call, "id": f"call_{index}"} for index, call in enumerate(calls)]
        return StepResult(done=False, messages=messages, reward_parts=parts, tool_calls=tool_calls)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    def _right(self, response: str) -> bool:
        expected, answer = last_number(self._answer), content_of(response).strip()
        if expected is None:
            return answer == self._answer
        return same_number(last_number(answer), expected, self._tolerance)

    async def _call(self, function: dict[str, Any]) -> tuple[str, bool]:
        """Return a tool's answer, and whether the call failed."""
        name: str = function["name"]
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}, only {', '.join(self._tools)}", True
        try:
            bound = inspect.signature(tool).bind(**function["arguments"])
            value = tool(*bound.args, **bound.kwargs)
            return str(await value if inspect.isawaitable(value) else value), False
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; the model gets it
            return f"error: {name}: {error}", True
