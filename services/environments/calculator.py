"""The ready-made tool: arithmetic, and nothing else that Python could do."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST = 200  # characters
_LARGEST = 1e15  # numbers beyond it are not raised to powers, which could take for ever
_HIGHEST_POWER = 64


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression with + - * / // % ** and parentheses.

    Raises:
        ValueError: it is something else, or too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression is longer than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    value = _evaluate(tree.body)
    return str(int(value)) if float(value).is_integer() and abs(value) < _LARGEST else f"{value:g}"


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow) and (abs(a) > _LARGEST or abs(b) > _HIGHEST_POWER):
                raise ValueError("the power is too large")
            try:
                value = _BINARY[type(op)](a, b)
            except ZeroDivisionError:
                raise ValueError("division by zero") from None
            except OverflowError:
                raise ValueError("the result is too large") from None
            if not isinstance(value, complex):
                return value
            raise ValueError("the result is not a real number")
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
