"""What a prompt is: an object with `prompt`, which is text or a list of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from umbra.proto.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. `prompt_id` is its line number (1-based), so it is the same in every run."""

    prompt_id: str
    row: dict[str, Any]


def renamed(row: dict[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return `row` with columns renamed by `columns`, {ours: theirs}.

    Raises:
        UsageError: the row has no such column; begins with `where`.
    """
    if not columns:
        return row
    for ours, theirs in columns.items():
        if theirs not in row:
            raise UsageError(
                f'{where}: there is no column "{theirs}" for {ours}, only {", ".join(row)}'
            )
    moved = set(columns.values())
    kept = {name: value for name, value in row.items() if name not in moved}
    return kept | {ours: row[theirs] for ours, theirs in columns.items()}


def check_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `row` if it is a prompt that can be sent to a generator.

    Raises:
        UsageError: it is not; begins with `where`.
    """
    if "prompt" not in row:
        raise UsageError(f'{where}: the object has no "prompt"')
    if not _is_prompt(row["prompt"]):
        raise UsageError(
            f'{where}: "prompt" must be text or a list of {{"role", "content"}} objects, '
            f"got {_kind(row['prompt'])}"
        )
    try:
        msgpack.packb(row)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: cannot be sent to a generator: {error}") from error
    return row


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


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    if isinstance(value, str):
        return "empty text"
    if isinstance(value, list):
        return "a list of something else" if value else "an empty list"
    return names.get(type(value), "an object")
