"""Fills `RunConfig` from TOML, environment and overrides, with errors a person can act on."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.runtime.config import RunConfig, Section

ENV_PREFIX = "UMBRA_"


def load_config(
    file: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> RunConfig:
    """The configuration of `file`, changed by `UMBRA_SECTION__KEY` and `section.key=value`.

    `file` is TOML, or the JSON that `to_json` writes.

    Raises:
        UsageError: unreadable file, unknown key (with the nearest name), or a bad value.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read(Path(file))
        _check_names(tree, str(file))
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _assign(tree, path, value, f"environment variable {name}")
    for override in overrides:
        path, separator, value = override.partition("=")
        if not separator:
            raise UsageError(f"--set {override}: write it as section.key=value")
        _assign(tree, path.strip(), value.strip(), f"--set {override}")
    return _convert(tree, str(file) if file is not None else "configuration")


def as_dict(config: RunConfig) -> dict[str, Any]:
    """The whole tree as plain values, for JSON and for `umbra config show`."""
    tree = msgspec.to_builtins(config)
    assert isinstance(tree, dict)
    return tree


def to_json(config: RunConfig) -> bytes:
    """The resolved configuration as indented JSON, which `load_config` reads back."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(f"run file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"run file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"run file {path} is not valid TOML: {error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"run file {path} is not valid JSON: {error}") from error


def _check_names(tree: Mapping[str, Any], where: str) -> None:
    sections = get_type_hints(RunConfig)
    for section, values in tree.items():
        if section not in sections:
            raise UsageError(f"{where}: unknown section [{section}]{_nearest(section, sections)}")
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: {section} must be a table, written [{section}]")
        for key in values:
            _check_key(section, key, where)


def _check_key(section: str, key: str, where: str) -> None:
    cls: type[Section] = get_type_hints(RunConfig)[section]
    if key in cls.__struct_fields__:
        return
    elsewhere = [
        f"{name}.{key}"
        for name, other in get_type_hints(RunConfig).items()
        if key in other.__struct_fields__
    ]
    hint = f"; did you mean {elsewhere[0]}?" if elsewhere else _nearest(key, cls.__struct_fields__)
    raise UsageError(f"{where}: unknown key {section}.{key}{hint}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"


def _assign(tree: dict[str, Any], path: str, text: str, where: str) -> None:
    section, _, key = path.partition(".")
    sections = get_type_hints(RunConfig)
    if section not in sections:
        raise UsageError(f"{where}: unknown section {section!r}{_nearest(section, sections)}")
    key, _, rest = key.partition(".")
    _check_key(section, key, where)
    values = tree.setdefault(section, {})
    if rest:  # a key inside a table, such as environment.options.tries
        values.setdefault(key, {})[rest] = _scalar(text)
    else:
        is_text = get_type_hints(sections[section])[key] is str
        values[key] = text if is_text else _scalar(text)


def _scalar(text: str) -> Any:
    """`text` as a TOML value, or as the string it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _convert(tree: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return msgspec.convert(tree, RunConfig)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise UsageError(f"{where}: {place.rstrip('`') or 'root'}: {reason}") from error
