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
    """`row` with the columns that `columns` names, as {ours: theirs}, under our names.

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
    """`row`, if it is a prompt that can be sent to a generator.

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
    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, list) or not value:
        return False
    return all(_is_turn(turn) for turn in cast(list[object], value))


def _is_turn(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    turn = cast(dict[str, object], value)
    return isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "empty text" if not value else "text"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return "a list of something else" if value else "an empty list"
    return "an object"
