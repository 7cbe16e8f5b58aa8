"""Writes plain values as YAML; a library that also reads it is not worth a dependency."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Texts that no YAML reader takes for anything else: no number, boolean, null or sign in front.
PLAIN = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9_./-]*")
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def to_yaml(*documents: Mapping[str, Any]) -> str:
    """`documents` in block style, divided by `---`."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{_scalar(key)}:", item, indent=2)
    else:
        for item in value:
            if _is_block(item):
                first, *rest = _lines(item)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_inline(item)}"


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    if not _is_block(value):
        yield f"{head} {_inline(value)}"
    elif isinstance(value, Mapping) or any(_is_block(item) for item in value):
        yield head
        yield from (" " * indent + line for line in _lines(value))
    else:
        yield f"{head} [{', '.join(_inline(item) for item in value)}]"


def _is_block(value: Any) -> bool:
    """Whether `value` takes lines of its own: it holds something."""
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and len(value) > 0


def _inline(value: Any) -> str:
    match value:
        case str():
            return _scalar(value)
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case None:
            return "null"
        case Mapping():
            return "{}"
        case Sequence():
            return "[]"
        case _:
            raise TypeError(f"no YAML for {value!r}")


def _scalar(text: str) -> str:
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    """As in a quoted text: printable ASCII as it is, all else by its number."""
    if character in '"\\':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
