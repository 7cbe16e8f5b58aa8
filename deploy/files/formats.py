"""Writers of TOML, and of YAML that every reader takes for the same values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import tomli_w
import yaml


def to_toml(
    tree: Mapping[str, Any],
    remarks: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
) -> str:
    """Return a tree of sections as TOML text; keys without a value (None) are left out.

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


# What no reader, of YAML 1.1 or 1.2, takes for anything but text: PyYAML itself would leave `1e3`
# and `y` bare, which compose and Kubernetes read as a number and as true.
PLAIN = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9_./-]*")
WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class _Dumper(yaml.SafeDumper):
    """Quotes all other text, and repeats what occurs twice instead of naming it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = PLAIN.fullmatch(text) and text.lower() not in WORDS
    style = None if plain else "|" if "\n" in text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: Mapping[str, Any]) -> str:
    """Return `documents` in block style, divided by `---`."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=math.inf)
