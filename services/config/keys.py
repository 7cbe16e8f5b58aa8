"""The notation of a key: one line, `name: type = key(default, "doc", ge=0)`."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, Literal, Union, dataclass_transform, get_args, get_origin

import msgspec
from msgspec import Meta


class _Key:
    """A key until its section is made: its default, its meaning and what bounds its value."""

    def __init__(self, default: Any, doc: str, bounds: dict[str, Any]) -> None:
        self.default, self.doc, self.bounds = default, doc, bounds


def key(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    pattern: str | None = None,
    min_length: int | None = None,
) -> Any:
    """Declare a key. Bounds hold for the numbers or texts in its type, in lists and unions too."""
    bounds = dict(ge=ge, gt=gt, le=le, lt=lt, pattern=pattern, min_length=min_length)
    return _Key(default, doc, {name: bound for name, bound in bounds.items() if bound is not None})


def _bounded(kind: Any, bounds: dict[str, Any]) -> Any:
    """Return the type `kind` with `bounds` on the numbers or texts within it."""
    if kind in (int, float, str):
        return Annotated[kind, Meta(**bounds)]
    origin, args = get_origin(kind), get_args(kind)
    if not args or origin is Literal:
        return kind
    inner = tuple(_bounded(one, bounds) for one in args)
    return reduce(operator.or_, inner) if origin in (Union, types.UnionType) else origin[inner]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _SectionMeta(type(msgspec.Struct)):
    """A metaclass that turns the keys of a section into annotated fields of msgspec."""

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        annotations = dict(space.get("__annotations__", {}))
        for field, text in annotations.items():
            if isinstance(found := space.get(field), _Key):
                kind = eval(text, vars(sys.modules[space["__module__"]]))
                if found.bounds:
                    kind = _bounded(kind, found.bounds)
                annotations[field] = Annotated[kind, Meta(description=found.doc)]
                space[field] = found.default
        space["__annotations__"] = annotations
        return super().__new__(
            mcs, name, bases, space, kw_only=True, frozen=True, forbid_unknown_fields=True
        )


class Section(msgspec.Struct, metaclass=_SectionMeta):
    """Base of all sections: typed, immutable, unknown keys are refused."""

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each fault in this section alone."""
        return iter(())
