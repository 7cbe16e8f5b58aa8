"""Every key of the configuration in words, for help texts and docs/config.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_type_hints

import msgspec
import msgspec.inspect as introspect

from umbra.services.config import NamedEnvironment, RunConfig, Section
from umbra.services.config.loader import ENVIRONMENTS, SECTIONS, bare, expected

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
        """The key as `--set` takes it."""
        return f"{self.section}.{self.name}"


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """The default as one writes it after `--set section.key=`; "" if it is nothing."""
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or value is msgspec.NODEFAULT or value is msgspec.UNSET or value == "":
        return ""
    return value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))


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
    """The first line about a section."""
    return (_struct(section).__doc__ or "").strip().splitlines()[0]


def _struct(section: str) -> type[Section]:
    return NamedEnvironment if section == ENVIRONMENTS else get_type_hints(RunConfig)[section]
