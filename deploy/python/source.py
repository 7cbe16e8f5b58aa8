"""Functions of a program, named so that other processes find them: by module, or by their source.

What lies in a module is named `module:name`. What a notebook cell or the program itself
(`__main__`) defines cannot be imported by others: its source is copied into a module, together with
what it uses there (imports, other functions, constants). Nothing is pickled, so the run's folder
has its reward in plain Python, and `umbra up` can resume it later.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from umbra.proto.errors import UsageError

MODULE = "umbra_main"  # receives the copies

_TOOLSET = "UmbraTools"
_HEADING = '"""Copied from the program that began this run, with what it uses."""\n'
_FUTURE = "from __future__ import annotations\n"
_LITERALS = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set)


class CopiedSource:
    """Collects the functions and classes that a run needs of its program.

    `search` has the folders in which their modules lie; `text` is the module with the copies,
    empty if there are none.
    """

    def __init__(self) -> None:
        self.search: list[Path] = []
        self._pieces: dict[str, str] = {}  # by the name that it binds, in order
        self._bound: dict[str, Any] = {}

    @property
    def copied(self) -> list[str]:
        return list(self._pieces)

    @property
    def text(self) -> str:
        return "\n".join([_HEADING, _FUTURE, *self._pieces.values()]) if self._pieces else ""

    def target(self, definition: Callable[..., Any], argument: str) -> str:
        """Return "module:name" of `definition`, the `argument`; its source is copied if needed.

        Raises:
            UsageError: it has no name, no source, or uses what cannot be written as source.
        """
        if not inspect.isfunction(definition) and not inspect.isclass(definition):
            raise UsageError(
                f"{argument}: {definition!r} is a {type(definition).__name__}; give a function or "
                'a class that is made by def or class, or "module:name"'
            )
        if "<lambda>" in definition.__qualname__:
            raise UsageError(f"{argument}: a lambda has no name: write it with def")
        if (place := _importable(definition)) is not None:
            return f"{self._find(place[0])}:{place[1]}"
        self._copy(definition, argument)
        return f"{MODULE}:{definition.__name__}"

    def toolset(self, tools: Sequence[Callable[..., Any]]) -> str:
        """Return "module:name" of a copied class that has `tools` as TRL's environments have them.

        Raises UsageError as `target`.
        """
        methods = ""
        for tool in tools:
            self.target(tool, "tools")
            self._bind(tool.__name__, tool, "tools", _TOOLSET, needed=True)
            methods += f"    {tool.__name__} = staticmethod({tool.__name__})\n"
        reset = "    def reset(self, **row):\n        return None\n"
        self._pieces[_TOOLSET] = f"\nclass {_TOOLSET}:\n{methods}\n{reset}"
        return f"{MODULE}:{_TOOLSET}"

    def _find(self, name: str) -> str:
        """Have other processes look for the module `name` where this one found it; return it."""
        file = getattr(sys.modules.get(name), "__file__", None)  # of what not every Python has
        if file is not None and name.partition(".")[0] not in sys.stdlib_module_names:
            path = Path(file).resolve()
            folder = path.parents[name.count(".") + (path.name == "__init__.py")]
            self.search += [folder] if folder not in self.search else []
        return name

    def _is_bound(self, name: str, value: Any, argument: str) -> bool:
        if name in self._bound and self._bound[name] is not value:
            raise UsageError(f"{argument}: two things are called {name!r}; rename one of them")
        return name in self._bound

    def _copy(self, definition: Any, argument: str) -> None:
        name = definition.__name__
        if self._is_bound(name, definition, argument):
            return
        self._bound[name] = definition
        try:
            source = textwrap.dedent(inspect.getsource(definition))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError) as error:
            raise UsageError(
                f"{argument}: the source of {name!r} cannot be read ({error}): put it into a "
                f'module of its own and give "module:{name}"'
            ) from error
        scope = _scope(definition)
        for other, needed in _names(tree):
            if other in scope and other != name:
                self._bind(other, scope[other], argument, name, needed=needed)
        self._pieces[name] = f"\n{source}"

    def _bind(self, bound: str, value: Any, argument: str, user: str, *, needed: bool) -> None:
        """Have the module bind `bound` to `value`; unless `needed`, it may be left out."""
        if self._is_bound(bound, value, argument):
            return
        place = _importable(value)
        if place is not None:
            self._find(place[0])
        line = _line(bound, value, place)
        if line is None and (inspect.isfunction(value) or inspect.isclass(value)):
            self._copy(value, argument)
            if value.__name__ == bound:
                return
            line = f"{bound} = {value.__name__}"
        if line is not None:
            self._bound[bound] = value
            self._pieces[bound] = line
        elif needed:
            raise UsageError(
                f"{argument}: {user!r} uses {bound!r}, a {type(value).__name__}, which cannot be "
                f"copied as source: make it inside of {user!r}, or put both into a module of their "
                f'own and give "module:{user}"'
            )


def _importable(definition: Any) -> tuple[str, str] | None:
    """Return module and name (of a module "") that others can import; None for the program's."""
    if isinstance(definition, ModuleType):
        return definition.__name__, ""
    module_name = getattr(definition, "__module__", None)
    name = getattr(definition, "__qualname__", None) or getattr(definition, "_name", None)
    module = sys.modules.get(module_name or "")
    if module is None or module_name == "__main__" or not name:
        return None
    value: Any = module
    for part in str(name).split("."):
        value = getattr(value, part, None)
    return (str(module_name), str(name)) if value is definition else None


def _scope(definition: Any) -> dict[str, Any]:
    """Return the values of global and closure names in a function, or in a class's methods."""
    scope = dict(vars(sys.modules[definition.__module__]))
    if inspect.isclass(definition):
        scope |= {base.__name__: base for base in definition.__bases__ if base is not object}
    members = [definition] if inspect.isfunction(definition) else vars(definition).values()
    for member in members:  # unwrapped from descriptors and decorators
        function = inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(function):
            scope |= function.__globals__ | dict(inspect.getclosurevars(function).nonlocals)
    scope.pop("__class__", None)
    return scope


def _names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that `tree` reads, and whether they are needed (annotations' are not)."""
    nodes = list(ast.walk(tree))
    fields = (getattr(node, name, None) for node in nodes for name in ("annotation", "returns"))
    optional = {id(inner) for field in fields if field is not None for inner in ast.walk(field)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id, id(node) not in optional


def _line(name: str, value: Any, place: tuple[str, str] | None) -> str | None:
    """Return the line that binds `name` to `value`; None if there is none."""
    if place is not None:
        module, inner = place
        if "." in inner:
            return f"import {module}\n{name} = {module}.{inner}"
        return f"from {module} import {inner} as {name}" if inner else f"import {module} as {name}"
    if isinstance(value, re.Pattern):
        return f"import re\n{name} = re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, _LITERALS):
        with suppress(ValueError, SyntaxError):
            if ast.literal_eval(repr(value)) == value:
                return f"{name} = {value!r}"
    return None
