"""Prompts from JSONL, Parquet or a Hugging Face data set; one of them or a weighted mixture.

What is drawn n-th depends on the seed, the sources and n alone, so a position is a few numbers.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import Prompt, PromptStream, check_row, read_prompts
from umbra.services.runtime.config import Data

DATASETS = "datasets:"

log = logging.getLogger(__name__)

Curriculum = Callable[[list[dict[str, Any]], int], Sequence[int]]
"""`(rows, epoch)` to the indices of the rows to draw in that epoch, in order."""


def open_prompts(data: Data, *, seed: int, attempts: int = 0) -> PromptFeed:
    """The stream of prompts that a configuration asks for.

    Args:
        data: the section.
        seed: of all orders.
        attempts: bad ends of a prompt until it is drawn no more; 0 = any number.

    Raises:
        UsageError: no prompts are named, or a source cannot be read; names the key and the place.
    """
    if data.prompts and data.sources:
        raise UsageError("data.prompts and data.sources are both set: remove one of them")
    order = load_curriculum(data.curriculum) if data.curriculum else None
    if not data.sources:
        source = EpochSource(read_source(data.prompts), data.shuffle, seed, order)
        return PromptFeed(source, attempts)
    if bad := [name for name, weight in data.sources.items() if weight <= 0]:
        raise UsageError(f"data.sources: the weight of {bad[0]} must be more than 0")
    sources = {
        name: EpochSource(read_source(name, f"{number}/"), data.shuffle, f"{seed}/{number}", order)
        for number, name in enumerate(data.sources)
    }
    return PromptFeed(Mixture(sources, list(data.sources.values()), seed), attempts)


def read_source(name: str, prefix: str = "") -> list[Prompt]:
    """All rows of one source; `prefix` goes before their ids, so that those of two differ.

    Raises:
        UsageError: it cannot be read, is empty, or has a row that is no prompt.
    """
    if name.startswith(DATASETS):
        rows = _read_dataset(name)
    elif name.endswith(".parquet"):
        rows = _read_parquet(name)
    else:
        return [Prompt(prefix + prompt.prompt_id, prompt.row) for prompt in read_prompts(name)]
    if not rows:
        raise UsageError(f"{name} has no rows")
    return [
        Prompt(f"{prefix}{number}", check_row(row, f"{name}, row {number}"))
        for number, row in enumerate(rows, start=1)
    ]


def _read_parquet(path: str) -> list[dict[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise _missing("pyarrow", path) from error
    if not Path(path).is_file():
        raise UsageError(f"{path} cannot be read: there is no such file")
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"{path} is no Parquet file that can be read: {error}") from error


def _read_dataset(name: str) -> list[dict[str, Any]]:
    """`datasets:NAME[:SPLIT]`; NAME is a folder or a name on the hub, SPLIT "train" by default."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise _missing("datasets", name) from error
    path, _, split = name.removeprefix(DATASETS).partition(":")
    try:
        return [dict(row) for row in datasets.load_dataset(path, split=split or "train")]
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded: {error}") from error


def _missing(package: str, source: str) -> UsageError:
    return UsageError(
        f"{source} needs {package}, which is not installed: pip install 'umbra-rl[tasks]'"
    )


def load_curriculum(target: str) -> Curriculum:
    """The function "module:function" of `data.curriculum`.

    Raises:
        UsageError: there is none.
    """
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name, None) if name else None
    except Exception as error:
        raise UsageError(f"data.curriculum {target!r}: importing it failed: {error}") from error
    if not callable(function):
        raise UsageError(f'data.curriculum {target!r}: write it as "module:function"')
    return cast(Curriculum, function)


class EpochSource:
    """Endless epochs over rows, each in an order of its own.

    Args:
        prompts: the rows.
        shuffle: a new order in every epoch, else the given one.
        seed: of the orders.
        curriculum: gives the order of an epoch instead. It must depend on its arguments alone, or
            a restarted run goes on in another order.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        shuffle: bool,
        seed: int | str,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._curriculum = curriculum
        self._epoch = 0
        self._index = 0  # in the epoch, of the next prompt
        self._order: list[int] = []  # of the epoch; empty = not made yet

    def __len__(self) -> int:
        return len(self.prompts)

    def __next__(self) -> Prompt:
        if not self._order:
            self._order = self._make_order()
        prompt = self.prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self._order):
            self._epoch, self._index, self._order = self._epoch + 1, 0, []
        return prompt

    def position(self) -> dict[str, Any]:
        """Epoch and index, and the number of rows, which tells the source from another one."""
        return {"epoch": self._epoch, "index": self._index, "rows": len(self.prompts)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken.

        Raises:
            UsageError: that was in another file.
        """
        if position.get("rows") != len(self.prompts):
            raise UsageError(
                f"the prompts have {len(self.prompts)} rows, but the run began with "
                f"{position.get('rows')}: use the same files, or begin a new run"
            )
        self._epoch, self._index, self._order = position["epoch"], position["index"], []

    def _make_order(self) -> list[int]:
        count = len(self.prompts)
        if self._curriculum is None:
            order = list(range(count))
            if self._shuffle:
                random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
            return order
        order = list(self._curriculum([prompt.row for prompt in self.prompts], self._epoch))
        if not order or not all(0 <= index < count for index in order):
            raise UsageError(
                f"data.curriculum must return indices from 0 to {count - 1}, at least one; for "
                f"epoch {self._epoch} it returned {order[:10]}"
            )
        return order


class Mixture:
    """Draws from several sources, each with a probability in proportion to its weight."""

    def __init__(
        self, sources: dict[str, EpochSource], weights: Sequence[float], seed: int | str
    ) -> None:
        self._sources = sources
        self._weights = list(itertools.accumulate(weights))
        self._seed = seed
        self._drawn = 0

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))

    def __next__(self) -> Prompt:
        choice = random.Random(f"{self._seed}/mixture/{self._drawn}")
        (source,) = choice.choices(list(self._sources.values()), cum_weights=self._weights)
        self._drawn += 1
        return next(source)

    def position(self) -> dict[str, Any]:
        """How many were drawn, and the position in every source."""
        places = {name: source.position() for name, source in self._sources.items()}
        return {"drawn": self._drawn, "sources": places}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken.

        Raises:
            UsageError: that was with other sources.
        """
        places = position.get("sources", {})
        if set(places) != set(self._sources):
            raise UsageError(
                f"data.sources has {', '.join(self._sources)}, but the run began with "
                f"{', '.join(places) or 'one file'}: use the same ones, or begin a new run"
            )
        self._drawn = position["drawn"]
        for name, place in places.items():
            self._sources[name].seek(place)


class SizedStream(PromptStream, Protocol):
    """A stream that knows how many different prompts it has."""

    def __len__(self) -> int: ...


class PromptFeed:
    """What the broker draws from: a stream without the prompts that keep failing.

    Args:
        stream: of all prompts.
        attempts: bad ends of a prompt (its group failed or was filtered) until it is drawn no
            more; 0 = any number.
    """

    def __init__(self, stream: SizedStream, attempts: int = 0) -> None:
        self._stream = stream
        self._attempts = attempts
        self._bad: Counter[str] = Counter()
        self.withdrawn = 0  # prompts that are drawn no more

    def __len__(self) -> int:
        return len(self._stream)

    def __next__(self) -> Prompt:
        # Weights and repetitions may show a good one late: a bad streak this long means none.
        for _ in range(10 * len(self._stream)):
            prompt = next(self._stream)
            if not self._attempts or self._bad[prompt.prompt_id] < self._attempts:
                return prompt
        log.warning("all prompts have failed buffer.prompt_attempts times: they start over")
        self._bad.clear()
        self.withdrawn = 0
        return next(self._stream)

    def ended_badly(self, prompt_id: str) -> None:
        """A group of this prompt failed, or was filtered."""
        if self._attempts:
            self._bad[prompt_id] += 1
            self.withdrawn += self._bad[prompt_id] == self._attempts

    def position(self) -> dict[str, Any]:
        """Where the stream is, and the prompts that ended badly."""
        return {"stream": self._stream.position(), "bad": dict(self._bad)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken.

        Raises:
            UsageError: that was with other prompts.
        """
        self._stream.seek(position["stream"])
        self._bad = Counter(position["bad"])
        self.withdrawn = sum(1 for n in self._bad.values() if n >= self._attempts > 0)
