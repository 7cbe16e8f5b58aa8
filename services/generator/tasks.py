"""Built-in tasks as data: prompts, held-out prompts and worked examples of a poor teacher.

SORT: sort a list of digits (one turn). GUESS: find a digit in four tries (several turns).
verifiers:ID: rows of a library's environment. Warm-starting on the teacher gives a model that is
right now and then, which is what RL needs.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.environments.loading import find_modules_here
from umbra.services.environments.verifiers import task_rows

Row = dict[str, Any]

VERIFIERS = "verifiers:"
_HELD_OUT_SHARE = 8  # at most one in so many of the tasks of a library that has too few
_SHORTEST, _LONGEST, _MEAN_EXTRA = 2, 16, 5.0
_HEEDFUL = 0.25  # guesses of the poor player that fit the hints so far
_SLOPPY = 0.88  # share of SORT examples with a mistake; some mistakes leave the answer right
_TRIES = 4


class BuiltInTask(NamedTuple):
    prompt: Callable[[random.Random], Row]
    demo: Callable[[random.Random], Row]
    distinct: bool  # held-out prompts never occur among prompts and demos, whatever the seed


def write_task(
    name: str,
    out: Path,
    *,
    seed: int,
    prompts: int,
    heldout: int,
    demos: int,
    options: dict[str, Any] | None = None,
    environment: str = "",
) -> dict[str, int]:
    """Write so many rows to prompts.jsonl, heldout.jsonl and demos.jsonl of `out`; return how many.

    Args:
        name: a key of `TASKS`; or "verifiers:ID", which has no demos.
        out, seed, prompts, heldout, demos: the folder; of the draws; rows of each file.
        options: of the library's environment.
        environment: what every prompt row names as its environment, if that is not "".

    Raises UsageError: no such task.
    """
    if name.startswith(VERIFIERS):
        find_modules_here()
        drawn = task_rows(name.removeprefix(VERIFIERS), options or {}, prompts + heldout, seed)
        if len(drawn) < prompts + heldout:
            heldout = min(heldout, len(drawn) // _HELD_OUT_SHARE)
        first = len(drawn) - heldout
        files = {"prompts.jsonl": drawn[: min(prompts, first)], "heldout.jsonl": drawn[first:]}
    elif name in TASKS:
        task = TASKS[name]
        files = {
            "prompts.jsonl": _draw(task.prompt, task, f"{name}/{seed}/prompts", prompts),
            "heldout.jsonl": _draw(task.prompt, task, f"{name}/{seed}/heldout", heldout, held=True),
            "demos.jsonl": _draw(task.demo, task, f"{name}/{seed}/demos", demos),
        }
    else:
        raise UsageError(
            f"task {name!r} is unknown; use {', '.join(TASKS)}, or {VERIFIERS}ID for an "
            "environment or taskset of verifiers"
        )
    out.mkdir(parents=True, exist_ok=True)
    for file, rows in files.items():
        if environment and file != "demos.jsonl":
            rows = [{"environment": environment, **row} for row in rows]
        (out / file).write_bytes(msgspec.json.Encoder().encode_lines(rows))
    return {file: len(rows) for file, rows in files.items()}


def _draw(
    make: Callable[[random.Random], Row],
    task: BuiltInTask,
    seed: str,
    count: int,
    *,
    held: bool = False,
) -> list[Row]:
    """Return `count` rows; held-out prompts are an eighth of all of every length, for any seed."""

    def is_held_out(row: Row) -> bool:
        text = row["prompt"] if "prompt" in row else row["messages"][0]["content"]
        return zlib.crc32(text.encode()) % 8 == 0

    source = random.Random(seed)
    rows = (make(source) for _ in itertools.count())
    fitting = (row for row in rows if not task.distinct or is_held_out(row) == held)
    return list(itertools.islice(fitting, count))


def _digits(source: random.Random) -> list[int]:
    extra = int(source.expovariate(1 / _MEAN_EXTRA))  # a long tail, as real responses have
    return [source.randrange(10) for _ in range(min(_SHORTEST + extra, _LONGEST))]


def _sort_prompt(source: random.Random) -> Row:
    digits = _digits(source)
    return {"prompt": _text(digits), "answer": _text(sorted(digits))}


def _sort_demo(source: random.Random) -> Row:
    """Return an answer that mostly has a mistake: the input, a swap, or another digit."""
    digits = _digits(source)
    answer = sorted(digits)
    if source.random() < _SLOPPY:
        kind = source.randrange(3)
        at = source.randrange(len(answer) - 1) if kind else 0
        if not kind:
            answer = digits
        elif kind == 1:
            answer[at], answer[at + 1] = answer[at + 1], answer[at]
        else:
            answer[at] = source.randrange(10)
    return _conversation([_text(digits), _text(answer)])


def _guess_prompt(source: random.Random) -> Row:
    return {"prompt": "guess", "answer": str(source.randrange(10))}


def _guess_demo(source: random.Random) -> Row:
    """Return guesses that mostly ignore the hints."""
    secret, low, high = source.randrange(10), 0, 9
    turns = ["guess"]
    for _ in range(_TRIES):
        heeds = source.random() < _HEEDFUL
        guess = source.randint(low, high) if heeds else source.randrange(10)
        turns.append(str(guess))
        if guess == secret:
            break
        turns.append(">" if guess < secret else "<")
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return _conversation(turns if len(turns) % 2 == 0 else turns[:-1])


def _conversation(turns: list[str]) -> Row:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def _text(digits: list[int]) -> str:
    return "".join(map(str, digits))


TASKS = {
    "sort": BuiltInTask(_sort_prompt, _sort_demo, distinct=True),
    "guess": BuiltInTask(_guess_prompt, _guess_demo, distinct=False),
}
