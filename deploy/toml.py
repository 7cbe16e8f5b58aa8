"""Writes a configuration tree as TOML; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(
    tree: Mapping[str, Mapping[str, Any]],
    remarks: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
) -> str:
    """A tree of sections as TOML text; keys without a value (None) are left out.

    `remarks` are comments at the end of a section: a heading, and keys with their values.
    """
    sections = []
    for section, values in tree.items():
        lines = [f"[{section}]"]
        lines += [f"{key} = {_value(v)}" for key, v in values.items() if v is not None]
        if remarks and section in remarks:
            heading, implied = remarks[section]
            lines.append(f"# {heading}:")
            lines += [f"# {key} = {_value(value)}" for key, value in implied.items()]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # A JSON string is a TOML string, but for DEL, which TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            items = (f"{_value(key)} = {_value(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case _:
            raise TypeError(f"no TOML for {value!r}")
