"""The prompts of a run, in endless epochs: one source, or by weight one of each environment.

The n-th draw depends on the seed, the sources and n alone, so a position is a few numbers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config import DataConfig, NamedEnvironment
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.prompts import Prompt, read_source


def open_prompts(
    data: DataConfig, *, seed: int, environments: Sequence[NamedEnvironment] = ()
) -> PromptFeed:
    """Open the prompts that a configuration asks for.

    Of several `environments` each is drawn by its weight, and begins the ids of its prompts.

    Raises:
        UsageError: no prompts are named, or a source cannot be read; names the key and the place.
    """
    rows = rows_by_environment(data, environments)
    weights = {environment.name: environment.weight for environment in environments}
    return PromptFeed(rows, weights, data.shuffle, seed)


def rows_by_environment(
    data: DataConfig, environments: Sequence[NamedEnvironment], prefix: str = ""
) -> dict[str, list[Prompt]]:
    """Return the prompts of each environment by its name.

    Of a single one by "", with `prefix` before their ids. Raises as `open_prompts`.
    """
    if not environments:
        return {"": read_source(data.prompts, prefix, data.columns)}
    if data.prompts:
        raise UsageError(
            f"data.prompts = {data.prompts}, and each of [[environments]] has prompts of its own: "
            "remove it"
        )
    rows: dict[str, list[Prompt]] = {}
    for environment in environments:
        name = environment.name
        if not environment.prompts:
            raise UsageError(f"environments.{name}.prompts is not set: name its source of prompts")
        own = read_source(environment.prompts, environment_prefix(name), data.columns)
        rows[name] = [_named(prompt, environment) for prompt in own]
    return rows


def _named(prompt: Prompt, environment: NamedEnvironment) -> Prompt:
    name = prompt.row.get(ENVIRONMENT, environment.name)
    if name != environment.name:
        raise UsageError(
            f'{environment.prompts}, row {prompt.prompt_id}: "{ENVIRONMENT}" is {name!r}, '
            f"but the file is that of {environment.name!r}"
        )
    return Prompt(prompt.prompt_id, {**prompt.row, ENVIRONMENT: environment.name})


@dataclass(eq=False)
class PromptFeed:
    """Endless epochs over the rows of each source, in an order of its own if they are shuffled.

    Of several one is drawn by `weights` each time; a single one needs none.
    """

    rows: Mapping[str, Sequence[Prompt]]
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._drawn = dict.fromkeys(self.rows, 0)
        self._orders: dict[str, list[int]] = {}  # of the epochs under way

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def __next__(self) -> Prompt:
        name, seed = next(iter(self.rows)), f"{self.seed}"
        if self.weights:
            choice = random.Random(f"{self.seed}/mixture/{sum(self._drawn.values())}")
            names = list(self.rows)
            (name,) = choice.choices(names, [self.weights[name] for name in names])
            seed = f"{self.seed}/{names.index(name)}"
        rows = self.rows[name]
        epoch, index = divmod(self._drawn[name], len(rows))
        if index == 0 or name not in self._orders:
            order = self._orders[name] = list(range(len(rows)))
            if self.shuffle:
                random.Random(f"{seed}/{epoch}").shuffle(order)
        self._drawn[name] += 1
        return rows[self._orders[name][index]]

    def position(self) -> dict[str, Any]:
        """Return how many were drawn from each source, and its rows, which tell it from others."""
        return {name: (drawn, len(self.rows[name])) for name, drawn in self._drawn.items()}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue from `position`; raises UsageError if that was with other sources."""
        if set(position) != set(self.rows):
            raise UsageError(
                f"the run's sources are {', '.join(self.rows) or 'one file'}, but it began with "
                f"{', '.join(position) or 'one file'}: use the same ones, or begin a new run"
            )
        for name, (drawn, rows) in position.items():
            if rows != len(self.rows[name]):
                raise UsageError(
                    f"the prompts have {len(self.rows[name])} rows, but the run began with "
                    f"{rows}: use the same files, or begin a new run"
                )
            self._drawn[name] = drawn
        self._orders = {}
