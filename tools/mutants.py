"""The small changes that a good test notices: what can be changed in a source file, and how.

Changed are comparisons, arithmetic, `and` and `or`, `not`, numbers, `True` and `False`, `min` and
`max`, `any` and `all`; statements that are calls or assignments to something that outlives the
function are dropped. Left alone is what no test should pin down: text, logging, annotations,
decorators, assertions; and by their names time-outs and intervals, of which somewhat more is as
right: the value of a constant whose name ends in `_S` or `_MS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TUNED = re.compile(r"[A-Z_]+_(S|MS)")
_FRAMEWORK = ("log", "logger", "logging", "transformers_logging", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    place: int  # number of the node that is changed
    change: int  # which of the changes that it allows
    line: int
    lines: range  # of the statement, as far as it is run with this line
    what: str  # the change, for people

    def apply(self, text: str) -> str:
        """The source of the file, which is `text`, with the change."""
        tree = ast.parse(text)
        node, replace, _ = list(_walk(tree, None))[self.place]
        replace(_changes(node)[self.change][1])
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants(path: str, text: str) -> list[Mutant]:
    """All mutants of the file `path` that holds `text`, in the order of the file."""
    found: list[Mutant] = []
    for place, (node, _, statement) in enumerate(_walk(ast.parse(text), None)):
        for change, (what, new) in enumerate(_changes(node)):
            shown = what or f"{_short(ast.unparse(node))} -> {_short(ast.unparse(new))}"
            line = getattr(node, "lineno", statement.lineno)
            found.append(Mutant(path, place, change, line, _run_with(statement), shown))
    return found


Place: TypeAlias = tuple[ast.AST, Callable[[ast.AST], None], ast.stmt]


def _walk(node: ast.AST, statement: ast.stmt | None) -> Iterator[Place]:
    """Every node that may be changed, how to put another in its place, and its statement."""
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "annotation", "returns", "keywords") and not (
            name == "keywords" and isinstance(node, ast.Call)
        ):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            inner = child if isinstance(child, ast.stmt) else statement

            def replace(
                new: ast.AST, name: str = name, value: object = value, index: int = index
            ) -> None:
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, name, new)

            if inner is not None and _changes(child):
                yield child, replace, inner
            yield from _walk(child, inner)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) if _TUNED.fullmatch(name):
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if value is not None:
            return _is_alias(value)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in _FRAMEWORK:
            return True
        case ast.Expr(value=call):
            return _is_left_alone(call)
        case _:
            return False


def _is_alias(value: ast.AST) -> bool:
    """Whether a union of types, which only type checkers read."""
    match value:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return all(
                _is_alias(side) or isinstance(side, ast.Name | ast.Attribute | ast.Subscript)
                for side in (left, right)
                if not (isinstance(side, ast.Constant) and side.value is None)
            ) and any(
                (isinstance(side, ast.Name) and side.id[:1].isupper())
                or (isinstance(side, ast.Constant) and side.value is None)
                or _is_alias(side)
                for side in (left, right)
            )
        case _:
            return False


def _changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """What may stand in the place of `node`; each with a description if it needs one."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in _COMPARE:
            return [("", ast.Compare(left, [_COMPARE[type(op)]()], right))]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            if _is_text(left) or _is_text(right):
                return []
            return [("", ast.BinOp(left, _ARITHMETIC[type(op)](), right))]
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _ARITHMETIC:
            if _is_text(value):
                return []
            other = ast.AugAssign(target, _ARITHMETIC[type(op)](), value)
            return [("", other), (f"dropped: {_short(ast.unparse(node))}", ast.Pass())]
        case ast.BoolOp(op=op, values=values):
            return [("", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [("", operand)]
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            return [("", operand)]
        case ast.Constant(value=bool() as value):
            return [("", ast.Constant(not value))]
        case ast.Constant(value=int() | float() as value):
            return [("", ast.Constant(value + 1))]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CALLS:
            return [("", ast.Call(ast.Name(_CALLS[name], ast.Load()), args, keywords))]
        case ast.Expr(value=ast.Call() | ast.Await()):
            return [(f"dropped: {_short(ast.unparse(node))}", ast.Pass())]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return [(f"dropped: {_short(ast.unparse(node))}", ast.Pass())]
        case ast.Delete():
            return [(f"dropped: {_short(ast.unparse(node))}", ast.Pass())]
        case ast.If(test=test, body=body, orelse=orelse) if not isinstance(
            test, ast.Compare | ast.UnaryOp | ast.BoolOp
        ):
            other = ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
            return [(f"if not {_short(ast.unparse(test))}", other)]
        case ast.IfExp(test=test, body=body, orelse=orelse) if not isinstance(
            test, ast.Compare | ast.UnaryOp | ast.BoolOp
        ):
            return [("", ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))]
        case ast.Break():
            return [("", ast.Continue())]
        case ast.Continue():
            return [("", ast.Break())]
        case _:
            return []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _run_with(statement: ast.stmt) -> range:
    """The lines of a statement; of one with a body those before it."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
        return range(statement.lineno, max(body[0].lineno, statement.lineno + 1))
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."
