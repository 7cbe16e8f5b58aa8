"""What a prompt is: an object with `prompt`, which is text or a list of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgpack

from umbra.proto.errors import UsageError
from umbra.services.runtime.process.jsonl import read_numbered


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. `prompt_id` is its line number (1-based), so it is the same in every run."""

    prompt_id: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """What came of a group of one prompt."""

    prompt_id: str
    reason: Literal["complete", "filtered", "failed"]
    rewards: list[float]  # of the samples that got one


class PromptStream(Protocol):
    """Prompts without end, in an order that can be taken up again after a crash."""

    def __next__(self) -> Prompt: ...

    def position(self) -> dict[str, Any]:
        """Where it is, in plain values."""
        ...

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken."""
        ...


class Prompts(Protocol):
    """Prompts without end, which can be told what became of them; as `sources.PromptFeed` can."""

    def __next__(self) -> Prompt: ...

    def ended(self, end: GroupEnd) -> None:
        """A group has come to its end."""
        ...

    def position(self) -> dict[str, Any]:
        """Where they are, in plain values."""
        ...

    def changes(self) -> dict[str, Any]:
        """What else has to be kept and has changed since the last call, by name."""
        ...

    def seek(self, position: dict[str, Any], kept: Mapping[str, Any]) -> None:
        """Go on where `position` was taken; `kept` is all that `changes` has told."""
        ...


def read_prompts(path: str | Path) -> list[Prompt]:
    """All rows of the JSONL file `path`, checked.

    Raises:
        UsageError: no such file, no rows, or a row that is no prompt; names the file and the line.
    """
    if not str(path):
        raise UsageError("data.prompts is not set: name a JSONL file with one prompt per line")
    return [
        Prompt(str(number), check_row(row, f"{path}, line {number}"))
        for number, row in read_numbered(path)
    ]


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
