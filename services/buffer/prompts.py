"""The prompts of a run: one source or a weighted mixture, in epochs without end.

What is drawn n-th depends on the seed, the sources and n alone, so a position is a few numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config import DataConfig, NamedEnvironment
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.prompts.readers import read_source
from umbra.services.prompts.rows import Prompt


def open_prompts(
    data: DataConfig,
    *,
    seed: int,
    environments: Sequence[NamedEnvironment] = (),
) -> PromptFeed:
    """Open the prompts that a configuration asks for.

    Args:
        environments: several, each drawn from by its weight; ids of their prompts begin with their
            names (`environment_prefix`).

    Raises:
        UsageError: no prompts are named, or a source cannot be read; names the key and the place.
    """
    if environments:
        rows = _rows_by_environment(data, environments)
        weights = {one.name: one.weight for one in environments}
    elif isinstance(data.prompts, str):
        prompts = read_source(data.prompts, columns=data.columns)
        return EpochSource(prompts, data.shuffle, seed)
    else:
        weights = data.prompts
        if bad := [name for name, weight in weights.items() if weight <= 0]:
            raise UsageError(f"data.prompts: the weight of {bad[0]} must be more than 0")
        rows = {
            name: read_source(name, f"{number}/", data.columns)
            for number, name in enumerate(weights)
        }
    sources = {
        name: EpochSource(rows[name], data.shuffle, f"{seed}/{number}")
        for number, name in enumerate(weights)
    }
    return Mixture(sources, weights, seed)


def first_rows(data: DataConfig, environments: Sequence[NamedEnvironment] = ()) -> dict[str, Any]:
    """Return the first prompt row of each environment by its name; of a single one by ""."""
    if environments:
        rows = _rows_by_environment(data, environments)
        return {name: prompts[0].row for name, prompts in rows.items()}
    name = next(iter(data.sources), "")
    return {"": read_source(name, columns=data.columns)[0].row}


def _rows_by_environment(
    data: DataConfig, environments: Sequence[NamedEnvironment]
) -> dict[str, list[Prompt]]:
    if not isinstance(data.prompts, str):
        raise UsageError(
            "data.prompts has several sources, and there are [[environments]], which have weights "
            "of their own: let each name its prompts"
        )
    shared = [one.name for one in environments if not one.prompts]
    if bool(shared) != bool(data.prompts):
        raise UsageError(
            f"[[environments]] {shared[0]} has no prompts: name a source, or set data.prompts"
            if shared
            else "data.prompts is set, but all [[environments]] have their own: remove it"
        )
    rows: dict[str, list[Prompt]] = {name: [] for name in shared}
    for prompt in read_source(data.prompts, columns=data.columns) if shared else ():
        name = prompt.row.get(ENVIRONMENT)
        if name not in rows:
            raise UsageError(
                f'{data.prompts}, row {prompt.prompt_id}: "{ENVIRONMENT}" is {name!r}, '
                f"which is no name of [[environments]] without prompts of their own "
                f"({', '.join(shared)})"
            )
        rows[name].append(Prompt(f"{environment_prefix(name)}{prompt.prompt_id}", prompt.row))
    if empty := [name for name in shared if not rows[name]]:
        raise UsageError(f'{data.prompts} has no row whose "{ENVIRONMENT}" is {empty[0]!r}')
    for one in environments:
        if one.prompts:
            rows[one.name] = [
                _named(prompt, one)
                for prompt in read_source(one.prompts, environment_prefix(one.name), data.columns)
            ]
    return rows


def _named(prompt: Prompt, environment: NamedEnvironment) -> Prompt:
    given = prompt.row.get(ENVIRONMENT, environment.name)
    if given != environment.name:
        raise UsageError(
            f'{environment.prompts}, row {prompt.prompt_id}: "{ENVIRONMENT}" is {given!r}, '
            f"but the file is that of {environment.name!r}"
        )
    return Prompt(prompt.prompt_id, {**prompt.row, ENVIRONMENT: environment.name})


class EpochSource:
    """Endless epochs over rows, each in an order of its own if they are to be shuffled."""

    def __init__(self, prompts: list[Prompt], shuffle: bool, seed: int | str) -> None:
        self.prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._index = 0  # in the epoch, of the next prompt
        self._order: list[int] = []  # of the epoch; empty = not made yet

    def __len__(self) -> int:
        return len(self.prompts)

    def __next__(self) -> Prompt:
        if not self._order:
            self._order = list(range(len(self.prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
        prompt = self.prompts[self._order[self._index]]
        self._index += 1
        if self._index == len(self._order):
            self._epoch, self._index, self._order = self._epoch + 1, 0, []
        return prompt

    def position(self) -> dict[str, Any]:
        """Return epoch and index, and the number of rows, which tells this source from others."""
        return {"epoch": self._epoch, "index": self._index, "rows": len(self.prompts)}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from `position`; raises UsageError if that was in another file."""
        if position.get("rows") != len(self.prompts):
            raise UsageError(
                f"the prompts have {len(self.prompts)} rows, but the run began with "
                f"{position.get('rows')}: use the same files, or begin a new run"
            )
        self._epoch, self._index, self._order = position["epoch"], position["index"], []


class Mixture:
    """Draws from several sources by name, with probabilities in proportion to their weights."""

    def __init__(
        self, sources: dict[str, EpochSource], weights: Mapping[str, float], seed: int | str
    ) -> None:
        self._sources = sources
        self._weights = [weights[name] for name in sources]
        self._seed = seed
        self._drawn = 0

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))

    def __next__(self) -> Prompt:
        choice = random.Random(f"{self._seed}/mixture/{self._drawn}")
        (source,) = choice.choices(list(self._sources.values()), self._weights)
        self._drawn += 1
        return next(source)

    def position(self) -> dict[str, Any]:
        """Return how many were drawn, and the position in every source."""
        places = {name: source.position() for name, source in self._sources.items()}
        return {"drawn": self._drawn, "sources": places}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from `position`; raises UsageError if that was with other sources."""
        places = position.get("sources", {})
        if set(places) != set(self._sources):
            raise UsageError(
                f"the run's sources are {', '.join(self._sources)}, but it began with "
                f"{', '.join(places) or 'one file'}: use the same ones, or "
                "begin a new run"
            )
        self._drawn = position["drawn"]
        for name, place in places.items():
            self._sources[name].seek(place)


PromptFeed = EpochSource | Mixture
