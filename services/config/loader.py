"""Fills `RunConfig` from TOML, environment and overrides, and writes it; errors name the remedy."""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec
import tomli_w

from umbra.proto.errors import UNREADABLE, UsageError
from umbra.services.config import NamedEnvironment, RunConfig

log = logging.getLogger(__name__)

ENV_PREFIX = "UMBRA_"
ORIGIN = "origin.json"  # beside the configuration of a run: the folder that it was written for
ENVIRONMENTS = "environments"
"""The one section that is a list of tables."""
FOREIGN: dict[str, tuple[str, int]] = {
    "async_generation_ratio": ("ROLL", 0),
    "generate_ahead_steps": ("async-rl / dots.rl", 1),  # the running step: 2 is one off-policy
}
"""Keys of `[buffer]` in other systems: whose they are, and what they count that ours do not."""
ELSEWHERE = {  # keys of other systems, and where the same is set here
    "param_update_preduce_bucket_size_mb": "weight_hub.bucket_bytes",
    "param_update_consume_bucket_size_mb": "weight_hub.receive_bucket_bytes",
    **{name: f"buffer.{name}" for name in FOREIGN},
}
SECTIONS: dict[str, dict[str, Any]] = {
    name: {
        key: kind
        for key, kind in get_type_hints(struct, include_extras=True).items()
        if key in struct.__struct_fields__
    }
    for name, section in get_type_hints(RunConfig).items()
    for struct in [NamedEnvironment if name == ENVIRONMENTS else section]
}


def load_config(
    file: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Load the configuration of `file`, changed by `UMBRA_SECTION__KEY` and `section.key=value`.

    `file` is TOML, or the JSON that `to_json` writes.

    Raises UsageError: unreadable file, unknown key (with the nearest name), or a bad value.
    """
    return msgspec.convert(load_tree(file, overrides=overrides, environ=environ), RunConfig)


def load_tree(
    file: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if file is not None:
        _merge(tree, read_run_file(Path(file)), str(file))
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _merge(tree, _at(path, text), f"environment variable {name}")
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator:
            raise UsageError(f"--set {override}: write it as section.key=value")
        _merge(tree, _at(path.strip().split("."), text.strip()), f"--set {override}")
    return tree


def given_keys(tree: Mapping[str, Any]) -> frozenset[str]:
    tables = ((section, keys) for section, keys in tree.items() if isinstance(keys, Mapping))
    return frozenset(f"{section}.{key}" for section, keys in tables for key in keys)


def config_of(tree: Any, source: str) -> RunConfig:
    checked: dict[str, Any] = {}
    _merge(checked, tree, source)
    return msgspec.convert(checked, RunConfig)


def as_dict(config: RunConfig) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def to_json(config: RunConfig) -> bytes:
    """Return the resolved configuration as indented JSON, which `load_config` reads back."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return a tree of sections as TOML text; keys without a value (None) are left out."""
    sections: list[str] = []
    for section, values in tree.items():
        if isinstance(values, list | tuple):  # of tables
            rows = [{k: v for k, v in entry.items() if v is not None} for entry in values]
            sections += [tomli_w.dumps({section: rows})] if rows else []
        else:
            given = {k: v for k, v in values.items() if v is not None}
            sections.append(tomli_w.dumps({section: given}))
    return "\n".join(sections)


def decode_json(text: str | bytes, kind: Any = Any) -> Any:
    """Return JSON as `kind`; raises an error of `UNREADABLE`, also where a key is given twice."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        for name, times in Counter(name for name, _ in pairs).items():
            if times > 1:
                raise ValueError(f'"{name}" is given twice')

    value = msgspec.json.decode(text, type=kind)
    json.loads(text, object_pairs_hook=check)
    return value


def read_run_file(path: Path, title: str = "run file") -> Any:
    """Read a run file, or another `title`, unchecked; UsageError if it is unreadable."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        json_file = path.suffix == ".json"
        return decode_json(rewrite_paths(text, path)) if json_file else tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(f"{title} {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{title} {path} cannot be read: {error}") from error
    except UNREADABLE as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{title} {path} is not valid {kind}: {error}") from error


def rewrite_paths(text: str, path: Path) -> str:
    """Return the text of a file in a run's folder; in a copied one its paths name the copy."""
    origin = path.with_name(ORIGIN)
    try:
        before = json.loads(origin.read_bytes())["folder"] if origin.is_file() else ""
        names = before, f"{path.resolve().parent}/"
        old, new = (json.dumps(name, ensure_ascii=False)[1:-1] for name in names)
    except (OSError, *UNREADABLE, LookupError, TypeError):
        return text
    return text.replace(old, new) if old else text


class _Text(str):
    """A value from outside of a file: its key says whether it is text or has to be read."""


def _at(path: Sequence[str], text: str) -> Any:
    """Return the tree that has `text` at `path` alone."""
    return {path[0]: _at(path[1:], text)} if path else _Text(text)


def _merge(tree: dict[str, Any], settings: Any, source: str) -> None:
    """Merge a source into `tree`; each value is checked against the type of its key."""
    if not isinstance(settings, Mapping):
        raise UsageError(f"{source}: must be an object with a key per section")
    for section, values in cast(Mapping[str, Any], settings).items():
        if section not in SECTIONS:
            raise UsageError(f"{source}: unknown section [{section}]{_hint(section, SECTIONS)}")
        if section == ENVIRONMENTS:
            tree[section] = _environments(values, source)
        elif isinstance(values, Mapping):
            tree[section] = _keys(section, tree.get(section, {}), values, source)
        else:
            raise UsageError(
                f"{source}: {section} must be a table: [{section}] in a file, {section}.key=value "
                "in --set"
            )


def _environments(entries: Any, source: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UsageError(f"{source}: write each of {ENVIRONMENTS} as [[{ENVIRONMENTS}]] in a file")
    checked: dict[str, dict[str, Any]] = {}
    for entry in entries:
        environment = _keys(ENVIRONMENTS, {}, entry, source)
        if (name := environment.get("name")) is None:
            raise UsageError(f"{source}: every one of [[{ENVIRONMENTS}]] needs a name")
        if name in checked:
            raise UsageError(f"{source}: two of [[{ENVIRONMENTS}]] have the name {name}")
        if sampling := environment.get("sampling"):
            place = f"{source}: {ENVIRONMENTS}.{name}"
            if "stop_tokens" in sampling:
                raise UsageError(
                    f"{place}: sampling.stop_tokens end turns in all environments: set them in "
                    "[sampling], or texts of its own as stop"
                )
            environment["sampling"] = _keys("sampling", {}, sampling, place)
        checked[name] = environment
    return list(checked.values())


def _keys(
    section: str, old: Mapping[str, Any], values: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """Return the keys of a section that are `old`, changed by `values`."""
    result = dict(old)
    for key, value in _translate(section, values, source).items():
        result[key] = _convert(section, key, value, result.get(key), source)
    return result


def _merged(old: Any, new: Any, name: str, source: str) -> Any:
    """Return `new`; a table also gets the keys of `old` that it lacks."""
    if isinstance(new, _Text):
        return _scalar(new)
    if not isinstance(new, Mapping):
        return new
    if old is not None and not isinstance(old, dict):
        raise UsageError(f"{source}: {name} is not a table")
    table: dict[str, Any] = {**(old or {})}
    for key, value in cast(Mapping[str, Any], new).items():
        table[key] = _merged(table.get(key), value, key, source)
    return table


def _translate(section: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    result = dict(values)
    for name in values.keys() & FOREIGN.keys() if section == "buffer" else ():
        (system, offset), value = FOREIGN[name], _merged(None, result.pop(name), name, source)
        if not isinstance(value, int) or isinstance(value, bool) or value < offset:
            raise UsageError(f"{source}: buffer.{name} must be an integer >= {offset}")
        number = value - offset
        for key in ("run_ahead", "max_staleness"):
            if result.setdefault(key, number) != number:
                raise UsageError(
                    f"{source}: buffer.{name} = {value} ({system}) means {key} = {number}, "
                    f"but buffer.{key} is {result[key]}: remove one of them"
                )
        meaning = f"buffer.run_ahead = {number} and buffer.max_staleness = {number}"
        log.warning("%s: %s's %s = %s is read as %s", source, system, name, value, meaning)
    return result


def schema_of(section: str, key: str) -> dict[str, Any]:
    """Return the JSON schema of a key, without the null that stands for a key that is not set."""
    schema = msgspec.json.schema(SECTIONS[section][key])
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    return options[0] if len(options) == 1 else {**schema, "anyOf": options} if options else schema


def choices(schema: dict[str, Any]) -> list[str]:
    """Return the values that a key of this schema may have, if they can be listed."""
    if options := [choices(option) for option in schema.get("anyOf", ())]:
        return [value for values in options for value in values] if all(options) else []
    if schema.get("type") == "boolean":
        return ["true", "false"]
    return [*map(str, schema.get("enum", ()))]


def _convert(section: str, key: str, value: Any, old: Any, source: str) -> Any:
    fields = SECTIONS[section]
    if key not in fields:
        hint = _hint(key, [*fields, *FOREIGN] if section == "buffer" else fields, f"{section}.")
        raise UsageError(f"{source}: unknown key {section}.{key}{hint}")
    schema = schema_of(section, key)
    if isinstance(value, _Text) and schema.get("type") == "string":
        value = str(value)
    value = _merged(old, value, key, source)
    try:
        converted = msgspec.convert(value, fields[key])
        if not isinstance(converted, float) or math.isfinite(converted):
            return converted
    except msgspec.ValidationError:
        pass  # the error below says it with the name, the value and the source
    text = json.dumps(value, default=str)
    matches = difflib.get_close_matches(str(value).lower(), choices(schema), n=1, cutoff=0.6)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    raise UsageError(f"{source}: {section}.{key} must be {expected(schema)}, not {text}{hint}")


def _scalar(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return str(text)


def _hint(name: str, names: Iterable[str], prefix: str = "") -> str:
    likely = [f"{section}.{name}" for section, fields in SECTIONS.items() if name in fields]
    likely += [ELSEWHERE[name]] if name in ELSEWHERE else []
    if not likely:
        close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
        likely = [prefix + match for match in close]
    return f"; did you mean {' or '.join(likely)}?" if likely else f"; known: {', '.join(names)}"


def expected(schema: dict[str, Any]) -> str:
    """Return the values of a key of this schema in words."""
    if values := choices(schema):
        return "true or false" if values == ["true", "false"] else "one of " + ", ".join(values)
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _SIGNS.items() if name in schema]
    match schema:
        case {"anyOf": options}:
            return " or ".join(map(expected, options))
        case {"pattern": pattern}:
            return f"text like {pattern.strip('^$')}"
        case {"minLength": _}:
            return "text that is not empty"
        case {"prefixItems": items}:
            return f"a list of {len(items)} numbers"
        case {"items": {"enum": values}}:
            return f"a list of {', '.join(map(str, values))}"
        case {"items": {"type": "string"}}:
            return "a list of texts"
        case {"items": item}:
            return "a list of" + expected(item).removeprefix("an").replace("integer", "integers")
        case _:
            return " ".join([_WORDS[schema["type"]], " and ".join(bounds)]).rstrip()


_WORDS = {"integer": "an integer", "number": "a number", "string": "text", "object": "a table"}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
