"""Rows of prompts from any source: an object with `prompt`, which is text or a list of messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import IOBase
from typing import Any, cast

import msgpack

from umbra.proto.bounds import ROW_KEYS
from umbra.proto.errors import UsageError

ROW_BYTES = 16 << 20  # as it is sent; a lease of one such row fits into a frame
INTEGERS = range(-(1 << 63), 1 << 64)  # MessagePack's
_UNREAD = ("m", "M", "V")  # of dtypes: times become bare nanoseconds, records lose their names


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. `prompt_id` is its line number (1-based), so it is the same in every run."""

    prompt_id: str
    row: dict[str, Any]


def renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return `row` with columns renamed by {ours: theirs}; UsageError if it has no such column."""
    if not columns:
        return row
    for ours, theirs in columns.items():
        if theirs not in row:
            known = ", ".join(map(str, row))
            raise UsageError(f'{where}: there is no column "{theirs}" for {ours}, only {known}')
    moved = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in moved}
    return kept | {ours: row[theirs] for ours, theirs in columns.items()}


def rows_of(given: object, where: str) -> list[dict[str, Any]]:
    """Return the rows of an iterable of texts and mappings, a data set of Hugging Face, say.

    Raises:
        UsageError: it is something else, whose iteration would give names of columns or splits;
            begins with `where`.
    """
    kind = type(given).__name__
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise UsageError(f'{where}: a {kind} holds splits: give one, as in dataset["train"]')
    no_rows = isinstance(given, str | bytes | Mapping | IOBase) or hasattr(given, "columns")
    if no_rows or not isinstance(given, Iterable):
        raise UsageError(
            f"{where}: give a path or rows, not a {kind}; of a data frame give "
            'frame.to_dict("records")'
        )
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(cast(Iterable[object], given), start=1):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise UsageError(
                f"{where}, row {number} is a {type(row).__name__}; a row is a text, or a mapping "
                'with "prompt"'
            )
        rows.append(dict(cast(Mapping[str, Any], row)))
    return rows


def check_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `row` as plain JSON values; raise UsageError unless it is a prompt.

    The error begins with `where` and names the column.
    """
    plain = plain_row(row, where)
    if "prompt" not in plain:
        raise UsageError(f'{where}: the object has no "prompt"')
    prompt = plain["prompt"]
    if not _is_prompt(prompt):
        raise UsageError(
            f'{where}: "prompt" must be text or a list of {{"role", "content"}} objects, '
            f"got {repr(prompt)[:40]}"
        )
    try:
        size = len(cast(bytes, msgpack.packb(plain)))
    except ValueError as error:  # nested too deeply
        raise UsageError(f"{where}: cannot be sent to a generator: {error}") from error
    if size > ROW_BYTES:
        raise UsageError(f"{where}: {size} bytes; {ROW_BYTES} are the most")
    return plain


def plain_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `row` as plain JSON values.

    numpy's scalars and arrays become numbers and lists. Keys of nested objects whose value is null
    are left out: Arrow adds them where rows differ, and chat templates take them for set.

    Raises:
        UsageError: it has something else; begins with `where` and names the column.
    """
    if len(row) > ROW_KEYS:
        raise UsageError(f"{where}: the object has {len(row)} keys; {ROW_KEYS} are the most")
    try:
        return {_key(name, where): _plain(row[name], f'{where}, "{name}"') for name in row}
    except RecursionError:
        raise UsageError(f"{where}: cannot be sent to a generator: nested too deeply") from None


def _plain(value: Any, where: str) -> Any:
    """Return `value` as JSON has it."""
    match value:
        case None | bool():
            return value
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"{where}: a lone surrogate is no text that can be written as UTF-8"
                ) from None
            return str.__str__(value)  # of an Enum its value
        case int():
            if value not in INTEGERS:
                raise UsageError(f"{where}: {str(value)[:20]}... has more than 64 bits: write text")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise UsageError(
                    f"{where}: {value} is no number of JSON: fill it in or leave it out"
                )
            return float(value)
        case Mapping():
            items = cast(Mapping[Any, Any], value).items()
            return {
                _key(name, where): _plain(item, f"{where}.{name}")
                for name, item in items
                if item is not None
            }
        case list() | tuple():
            items = enumerate(cast(list[Any], value))
            return [_plain(item, f"{where}[{i}]") for i, item in items]
        case _ if getattr(getattr(value, "dtype", None), "kind", "") in _UNREAD:
            raise _no_json(value, where)
        case _ if hasattr(value, "dtype") and hasattr(value, "tolist"):
            return _plain(value.tolist(), where)
        case _:
            raise _no_json(value, where)


def _no_json(value: object, where: str) -> UsageError:
    kind = type(value).__name__
    return UsageError(
        f"{where}: a {kind} is no JSON value: write text, a number, a list or an object"
    )


def _key(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{where}: the key {name!r} is a {type(name).__name__}: keys are texts")
    return name


def _is_prompt(value: object) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str) and bool(value)
    turns = cast(list[Any], value)
    return bool(turns) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in cast(list[dict[str, object]], turns)
    )
