"""Writes a configuration tree as TOML; the standard library only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w


def to_toml(
    tree: Mapping[str, Any],
    remarks: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
) -> str:
    """A tree of sections as TOML text; keys without a value (None) are left out.

    `remarks` are comments at the end of a section: a heading, and keys with their values.
    """
    sections: list[str] = []
    for section, values in tree.items():
        if isinstance(values, list | tuple):  # of tables
            kept = [{k: v for k, v in entry.items() if v is not None} for entry in values]
            sections += [tomli_w.dumps({section: kept})] if kept else []
            continue
        text = tomli_w.dumps({section: {k: v for k, v in values.items() if v is not None}})
        if remarks and section in remarks:
            heading, implied = remarks[section]
            lines = [f"{heading}:", *tomli_w.dumps(implied).splitlines()]
            text += "".join(f"# {line}\n" for line in lines)
        sections.append(text)
    return "\n".join(sections)
