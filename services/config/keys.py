"""The notation of a key: one line, `name: type = key(default, "doc", ge=0)`."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterator
from functools import reduce
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import msgspec
from msgspec import Meta


class _Key(NamedTuple):
    """A key until its section is made."""

    default: Any
    doc: str
    bounds: dict[str, Any]


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """Declare a key. `bounds`, as `msgspec.Meta` names them, hold in lists and unions too."""
    return _Key(default, doc, bounds)


def _bounded(kind: Any, bounds: dict[str, Any]) -> Any:
    """Return the type `kind` with `bounds` on the numbers or texts within it."""
    if kind in (int, float, str):
        return Annotated[kind, Meta(**bounds)]
    origin, args = get_origin(kind), get_args(kind)
    if not args or origin is Literal:
        return kind
    inner = tuple(_bounded(arg, bounds) for arg in args)
    return reduce(operator.or_, inner) if origin in (Union, types.UnionType) else origin[inner]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _SectionMeta(type(msgspec.Struct)):
    """A metaclass that turns the keys of a section into annotated fields of msgspec."""

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        annotations = dict(space.get("__annotations__", {}))
        for field, text in annotations.items():
            if isinstance(declared := space.get(field), _Key):
                kind = eval(text, vars(sys.modules[space["__module__"]]))
                if declared.bounds:
                    kind = _bounded(kind, declared.bounds)
                annotations[field] = Annotated[kind, Meta(description=declared.doc)]
                space[field] = declared.default
        space["__annotations__"] = annotations
        return super().__new__(
            mcs, name, bases, space, kw_only=True, frozen=True, forbid_unknown_fields=True
        )


class Section(msgspec.Struct, metaclass=_SectionMeta):
    """Base of all sections: typed, immutable, unknown keys are refused."""

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each fault in this section alone."""
        return iter(())
