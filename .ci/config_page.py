"""docs/config.md: every key of a run file, from the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import get_type_hints

import msgspec

from umbra.services.config import NamedEnvironment, RunConfig, Section
from umbra.services.config.loader import ENVIRONMENTS, SECTIONS, expected, schema_of

READERS = {
    "run": "all processes",
    "model": "generators, trainer, scorers",
    "data": "buffer",
    "environment": "generators; scorers of stage reward",
    "environments": "buffer, generators",
    "sampling": "generators",
    "buffer": "buffer",
    "generator": "generators",
    "trainer": "trainer",
    "critic": "trainer",
    "checkpoint": "trainer",
    "weight_hub": "weight hub and its relays; trainer and generators for `dtype`",
    "scorer": "scorers",
    "eval": "`umbra up` before and after the run, the buffer within it",
    "metrics": "trainer",
    "security": "all processes",
    "log": "all processes",
}
# Words of an error's "expected ..." that a table does without.
_LONG = re.compile(r"\b(?:an?|one of) | that is not empty")


HEAD = """# Every key of a run file

Which keys a run file has, their values, defaults and meaning. A run file is TOML, with a table per
section; this page is made from the schema by `python .ci/config_page.py`. The environment variable
`UMBRA_SECTION__KEY` overrides the file, and `--set section.key=value` overrides
both, in each command. `umbra check RUN.toml` tries a run file, with `--show` it prints it with all
defaults. Names that end in `_s` are seconds. Defaults named "preset" come from the
[objective](algorithms.md).
"""


@dataclass(frozen=True, slots=True)
class Described:
    """A key: what it may be, what it is if not set ("" for nothing) and its meaning."""

    section: str
    name: str
    value: str
    default: str
    meaning: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


def described() -> Iterator[Described]:
    """All keys, in the order of the schema; of [[environments]] those that [environment] lacks."""
    for section in SECTIONS:
        for field in msgspec.structs.fields(_struct(section)):
            if section == ENVIRONMENTS and field.name in SECTIONS["environment"]:
                continue
            shown = "" if field.default is None else shown_default(field)
            schema = msgspec.json.schema(SECTIONS[section][field.name])
            value = expected(schema_of(section, field.name)).replace("true or false", "boolean")
            yield Described(
                section,
                field.name,
                _LONG.sub("", value),
                "preset" if field.default is None else f"`{shown}`" if shown else "",
                str(schema.get("description", "")),
            )


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """Return the default as one writes it after `--set section.key=`; "" if it is nothing."""
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or value is msgspec.NODEFAULT or value is msgspec.UNSET or value == "":
        return ""
    return value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))


def section_summary(section: str) -> str:
    return (_struct(section).__doc__ or "").strip().splitlines()[0]


def _struct(section: str) -> type[Section]:
    return NamedEnvironment if section == ENVIRONMENTS else get_type_hints(RunConfig)[section]


def config_page() -> str:
    """Return the page, as Markdown."""
    parts = [HEAD]
    for section, keys in groupby(described(), key=lambda key: key.section):
        parts.append(
            f"## {_heading(section)}\n\n{section_summary(section)} Read by: {READERS[section]}.\n"
        )
        parts.append("| key | value | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(_row(key) for key in keys) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def _heading(section: str) -> str:
    return f"[[{section}]]" if section == ENVIRONMENTS else f"[{section}]"


def _row(key: Described) -> str:
    cells = (f"`{key.name}`", key.value, key.default, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    print(config_page(), end="")
