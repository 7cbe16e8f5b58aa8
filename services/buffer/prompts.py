"""Prompts from a JSONL file: one object with `prompt` per line, shuffled anew in every epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgpack

from umbra.proto.errors import UsageError
from umbra.services.runtime.jsonl import read_numbered


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. `prompt_id` is its line number (1-based), so it is the same in every run."""

    prompt_id: str
    row: dict[str, Any]


class PromptStream(Protocol):
    """Prompts without end, in an order that can be taken up again after a crash."""

    def __next__(self) -> Prompt: ...

    def position(self) -> dict[str, Any]:
        """Where it is, in plain values."""
        ...

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken."""
        ...


class PromptSource:
    """Endless epochs over the rows of a JSONL file.

    Args:
        path: the file; blank lines are skipped.
        shuffle: a new order in every epoch, else the file's.
        seed: of the orders; the same seed gives the same sequence of prompts.

    Raises:
        UsageError: no such file, no rows, or a row that is no prompt; names the file and the line.
    """

    def __init__(self, path: str | Path, *, shuffle: bool, seed: int) -> None:
        self.prompts = read_prompts(path)
        self._shuffle = shuffle
        self._seed = seed
        self._drawn = 0
        self._order: list[Prompt] = []  # of the epoch of the next prompt

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        epoch, index = divmod(self._drawn, len(self.prompts))
        if not self._order or not index:
            self._order = list(self.prompts)
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._drawn += 1
        return self._order[index]

    def position(self) -> dict[str, Any]:
        """Where the source is, in plain values; the file's size tells it from another one."""
        return {"drawn": self._drawn, "rows": len(self.prompts)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken.

        Raises:
            UsageError: that was in another file.
        """
        if position["rows"] != len(self.prompts):
            raise UsageError(
                f"data.prompts has {len(self.prompts)} rows, but the run began with "
                f"{position['rows']}: use the same file, or begin a new run"
            )
        self._drawn = position["drawn"]
        self._order = []


def read_prompts(path: str | Path) -> list[Prompt]:
    """All rows of the JSONL file `path`, checked.

    Raises:
        UsageError: see `PromptSource`.
    """
    if not str(path):
        raise UsageError("data.prompts is not set: name a JSONL file with one prompt per line")
    return [
        Prompt(str(number), _checked(row, f"{path}, line {number}"))
        for number, row in read_numbered(path)
    ]


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    if "prompt" not in row:
        raise UsageError(f'{where}: the object has no "prompt"')
    if not _is_prompt(row["prompt"]):
        raise UsageError(
            f'{where}: "prompt" must be text or a list of {{"role", "content"}} objects, '
            f"got {_kind(row['prompt'])}"
        )
    try:
        msgpack.packb(row)
    except (OverflowError, ValueError) as error:
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
