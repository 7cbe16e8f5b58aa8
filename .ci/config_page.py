"""docs/config.md: every key of a run file, from the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import get_type_hints

import msgspec
import msgspec.inspect as introspect

from umbra.services.config import NamedEnvironment, RunConfig, Section
from umbra.services.config.loader import ENVIRONMENTS, SECTIONS, bare, expected
from umbra.services.process.command import shown_default

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
WITH_FLAGS = ("buffer", "generator", "trainer", "weight_hub", "scorer")
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_mib": "MiB", "_mb": "MiB", "_tokens": "tokens"}
_ODD_UNITS = {"max_context": "tokens", "steps": "steps", "warmup_steps": "steps"}
_NO_UNITS = ("stop_tokens",)


HEAD = """# Every key of a run file

Made from the schema by `python .ci/config_page.py`; a test compares. A run file is TOML, with a
table per section. The environment variable `UMBRA_SECTION__KEY` is stronger than the file, and
`--set section.key=value` stronger than both. `umbra check RUN.toml --show` prints a run file with
all defaults, `umbra check RUN.toml` tries it. Paths are looked for in the run file's folder first,
then in the current directory. Objectives, the keys that they set, and settings for staleness:
[algorithms.md](algorithms.md).
"""


@dataclass(frozen=True, slots=True)
class Described:
    """A key: what it may be, what it is if not set ("" for nothing), its unit and its meaning."""

    section: str
    name: str
    value: str
    default: str
    unit: str
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
            kind = introspect.type_info(SECTIONS[section][field.name])
            schema = getattr(kind, "extra_json_schema", None) or {}
            yield Described(
                section,
                field.name,
                expected(bare(kind)),
                "of the objective" if field.default is None else shown_default(field),
                _unit(field.name),
                str(schema.get("description", "")),
            )


def _unit(name: str) -> str:
    if name in _NO_UNITS:
        return ""
    ending = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return _ODD_UNITS.get(name, ending)


def section_summary(section: str) -> str:
    return (_struct(section).__doc__ or "").strip().splitlines()[0]


def _struct(section: str) -> type[Section]:
    return NamedEnvironment if section == ENVIRONMENTS else get_type_hints(RunConfig)[section]


def config_page() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for section, keys in groupby(described(), key=lambda key: key.section):
        flags = ""
        if section in WITH_FLAGS:
            command = section.replace("_", "-")
            flags = f" Each key is a flag of `umbra {command}` too, with hyphens."
        parts.append(
            f"## {_heading(section)}\n\n{section_summary(section)} Read by: {READERS[section]}."
            f"{flags}\n"
        )
        parts.append("| key | value | default | unit | meaning |\n|---|---|---|---|---|")
        parts.append("\n".join(_row(key) for key in keys) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def _heading(section: str) -> str:
    return f"[[{section}]]" if section == ENVIRONMENTS else f"[{section}]"


def _row(key: Described) -> str:
    default = f"`{key.default}`" if key.default else ""
    if key.default == "of the objective":
        default = "of the [objective](algorithms.md)"
    cells = (f"`{key.name}`", key.value, default, key.unit, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    print(config_page(), end="")
