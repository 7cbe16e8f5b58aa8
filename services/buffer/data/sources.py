"""The prompts of a run: one source or a weighted mixture, in epochs.

Without a curriculum what is drawn n-th depends on the seed, the sources and n alone, so a position
is a few numbers. The order that a curriculum made for an epoch is kept, and so is what it saw.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Protocol

from umbra.proto.errors import UsageError
from umbra.proto.records import pack_int32, unpack_int32
from umbra.services.buffer.data.curriculum import (
    Curriculum,
    PromptStats,
    ask_curriculum,
    load_function,
)
from umbra.services.buffer.data.environment_weights import (
    EnvironmentStats,
    EnvironmentWeights,
    Rule,
    learnable,
)
from umbra.services.buffer.data.prompts import GroupEnd, PromptStream
from umbra.services.config import DataConfig, NamedEnvironment
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.prompts.download import shown
from umbra.services.prompts.readers import read_source
from umbra.services.prompts.rows import Prompt

log = logging.getLogger(__name__)


def open_prompts(
    data: DataConfig,
    *,
    seed: int,
    attempts: int = 0,
    environments: Sequence[NamedEnvironment] = (),
) -> PromptFeed:
    """The stream of prompts that a configuration asks for.

    Args:
        data: the section.
        seed: of all orders.
        attempts: bad ends of a prompt until it is drawn no more; 0 = any number.
        environments: several, each drawn from by its weight; ids of their prompts begin with their
            names (`environment_prefix`).

    Raises:
        UsageError: no prompts are named, or a source cannot be read; names the key and the place.
    """
    if data.prompts and data.sources:
        raise UsageError("data.prompts and data.sources are both set: remove one of them")
    hook = load_function("data.curriculum", data.curriculum) if data.curriculum else None
    rule = _rule(data)
    history = History([one.name for one in environments]) if hook or attempts or rule else None

    def planned(number: int) -> Planned | None:
        return Planned(hook, history, str(number)) if hook and history else None

    if environments:
        rows = _rows_by_environment(data, environments)
        each = {
            one.name: EpochSource(rows[one.name], data.shuffle, f"{seed}/{number}", planned(number))
            for number, one in enumerate(environments)
        }
        weights = {one.name: one.weight for one in environments}
        moving = EnvironmentWeights(weights, history.environments if history else {}, rule)
        return PromptFeed(Mixture(each, moving.shares, seed), history, attempts, moving)
    if not data.sources:
        prompts = read_source(data.prompts, columns=data.columns)
        source = EpochSource(prompts, data.shuffle, seed, planned(0))
        return PromptFeed(source, history, attempts)
    if bad := [name for name, weight in data.sources.items() if weight <= 0]:
        raise UsageError(f"data.sources: the weight of {shown(bad[0])} must be more than 0")
    sources: dict[str, EpochSource] = {}
    for number, name in enumerate(data.sources):
        rows = read_source(name, f"{number}/", data.columns)
        sources[name] = EpochSource(rows, data.shuffle, f"{seed}/{number}", planned(number))
    return PromptFeed(Mixture(sources, lambda: data.sources, seed), history, attempts)


def _rule(data: DataConfig) -> Rule | None:
    match data.environment_weights:
        case "fixed":
            return None
        case "learnable":
            return learnable
        case target:
            return load_function("data.environment_weights", target)


def first_rows(data: DataConfig, environments: Sequence[NamedEnvironment] = ()) -> dict[str, Any]:
    """The first prompt row of each environment, by its name; of the one, if there is one, by "".

    Raises:
        UsageError: as of `open_prompts`.
    """
    if environments:
        rows = _rows_by_environment(data, environments)
        return {name: prompts[0].row for name, prompts in rows.items()}
    name = next(iter(data.sources), data.prompts)
    return {"": read_source(name, columns=data.columns)[0].row}


def _rows_by_environment(
    data: DataConfig, environments: Sequence[NamedEnvironment]
) -> dict[str, list[Prompt]]:
    """The prompts of each environment: of its own source, or those in data.prompts of its name."""
    if data.sources:
        raise UsageError(
            "data.sources and [[environments]] are both set: environments have weights of their "
            "own, and each may name its prompts"
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
                f'{shown(data.prompts)}, row {prompt.prompt_id}: "{ENVIRONMENT}" is {name!r}, '
                f"which is no name of [[environments]] without prompts of their own "
                f"({', '.join(shared)})"
            )
        rows[name].append(Prompt(f"{environment_prefix(name)}{prompt.prompt_id}", prompt.row))
    if empty := [name for name in shared if not rows[name]]:
        raise UsageError(f'{shown(data.prompts)} has no row whose "{ENVIRONMENT}" is {empty[0]!r}')
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
            f'{shown(environment.prompts)}, row {prompt.prompt_id}: "{ENVIRONMENT}" is {given!r}, '
            f"but the file is that of {environment.name!r}"
        )
    return Prompt(prompt.prompt_id, {**prompt.row, ENVIRONMENT: environment.name})


class History:
    """What came of the prompts, and the orders that were made of that; kept piece by piece.

    Args:
        environments: names of several, whose figures are kept too.
    """

    def __init__(self, environments: Sequence[str] = ()) -> None:
        self.environments = {name: EnvironmentStats() for name in environments}
        self.stats: dict[str, PromptStats] = {}  # by prompt id
        self.orders: dict[str, tuple[int, list[int]]] = {}  # by source: epoch and its order
        self._changed: set[str] = set()

    def add(self, end: GroupEnd) -> None:
        """A group has come to its end."""
        self.stats.setdefault(end.prompt_id, PromptStats()).add(end)
        self._changed.add(f"prompt/{end.prompt_id}")
        name = end.prompt_id.partition("/")[0]  # `environment_prefix`
        environment = self.environments.get(name)
        if environment is not None and environment.add(end):
            self._changed.add(f"environment/{name}")

    def forgive(self) -> None:
        """Count bad ends anew."""
        for prompt_id, stats in self.stats.items():
            if stats.bad:
                stats.bad = 0
                self._changed.add(f"prompt/{prompt_id}")

    def plan(self, source: str, epoch: int, order: list[int]) -> None:
        """The epoch of a source begins, in this order."""
        self.orders[source] = (epoch, order)
        self._changed.add(f"order/{source}")

    def changes(self) -> dict[str, Any]:
        """What has changed since the last call, as plain values."""
        changed, self._changed = self._changed, set()
        return {key: self._record(key) for key in changed}

    def restore(self, records: Mapping[str, Any]) -> None:
        """Take over what `changes` has told."""
        for key, record in records.items():
            kind, _, name = key.partition("/")
            if kind == "prompt":
                self.stats[name] = PromptStats(*record)
            elif kind == "environment":
                if (stats := self.environments.get(name)) is not None:
                    stats.restore(record)
            else:
                self.orders[name] = (record[0], unpack_int32(record[1]))

    def _record(self, key: str) -> Any:
        kind, _, name = key.partition("/")
        if kind == "prompt":
            return astuple(self.stats[name])
        if kind == "environment":
            return astuple(self.environments[name])
        epoch, order = self.orders[name]
        return [epoch, pack_int32(order)]


class Planned:
    """A curriculum of one source: asked once per epoch, its answer is kept."""

    def __init__(self, hook: Curriculum, history: History, source: str) -> None:
        self._hook = hook
        self._history = history
        self._source = source

    def order(self, prompts: Sequence[Prompt], epoch: int, *, begun: bool) -> list[int]:
        """The order of an epoch; the one that it has, if it was `begun` before."""
        if begun and (kept := self._history.orders.get(self._source)) and kept[0] == epoch:
            return kept[1]
        stats = [self._history.stats.get(p.prompt_id) or PromptStats() for p in prompts]
        order = ask_curriculum(self._hook, [prompt.row for prompt in prompts], epoch, stats)
        self._history.plan(self._source, epoch, order)
        return order


class EpochSource:
    """Endless epochs over rows, each in an order of its own.

    Args:
        prompts: the rows.
        shuffle: a new order in every epoch, else the given one.
        seed: of the orders.
        curriculum: gives the order of an epoch instead.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        shuffle: bool,
        seed: int | str,
        curriculum: Planned | None = None,
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
        if self._curriculum is not None:
            return self._curriculum.order(self.prompts, self._epoch, begun=self._index > 0)
        order = list(range(len(self.prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


class Mixture:
    """Draws from several sources, each with a probability in proportion to its weight.

    Args:
        sources: by name.
        weights: gives those of the moment, by the same names.
        seed: of the draws.
    """

    def __init__(
        self,
        sources: dict[str, EpochSource],
        weights: Callable[[], Mapping[str, float]],
        seed: int | str,
    ) -> None:
        self._sources = sources
        self._weights = weights
        self._seed = seed
        self._drawn = 0

    def __len__(self) -> int:
        return sum(map(len, self._sources.values()))

    def __next__(self) -> Prompt:
        choice = random.Random(f"{self._seed}/mixture/{self._drawn}")
        weights = self._weights()
        (source,) = choice.choices(
            list(self._sources.values()), [weights[name] for name in self._sources]
        )
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
                f"the run's sources are {', '.join(map(shown, self._sources))}, but it began with "
                f"{', '.join(map(shown, places)) or 'one file'}: use the same ones, or "
                "begin a new run"
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
        history: of them, if anybody wants to know.
        attempts: bad ends of a prompt (its group failed or was filtered) until it is drawn no
            more; 0 = any number.
        weights: of several environments.
    """

    def __init__(
        self,
        stream: SizedStream,
        history: History | None,
        attempts: int = 0,
        weights: EnvironmentWeights | None = None,
    ) -> None:
        self._weights = weights
        self._stream = stream
        self._history = history
        self._attempts = attempts

    @property
    def withdrawn(self) -> int:
        """Prompts that are drawn no more."""
        stats = self._history.stats.values() if self._history is not None else ()
        return sum(1 for one in stats if one.bad >= self._attempts > 0)

    def __len__(self) -> int:
        return len(self._stream)

    def __next__(self) -> Prompt:
        if self._history is None or not self._attempts:
            return next(self._stream)
        # Weights and repetitions may show a good one late: a bad streak this long means none.
        for _ in range(10 * len(self._stream)):
            prompt = next(self._stream)
            stats = self._history.stats.get(prompt.prompt_id)
            if stats is None or stats.bad < self._attempts:
                return prompt
        log.warning("all prompts have failed buffer.prompt_attempts times: they start over")
        self._history.forgive()
        return next(self._stream)

    def ended(self, end: GroupEnd) -> None:
        """A group of one of the prompts has come to its end."""
        if self._history is not None:
            self._history.add(end)

    def shares(self) -> dict[str, float]:
        """The probability of each environment at the next draw; empty if there are not several."""
        return self._weights.shares() if self._weights is not None else {}

    def position(self) -> dict[str, Any]:
        """Where the stream is."""
        return self._stream.position()

    def changes(self) -> dict[str, Any]:
        """What else has to be kept and has changed since the last call, by name."""
        return self._history.changes() if self._history is not None else {}

    def seek(self, position: dict[str, Any], kept: Mapping[str, Any]) -> None:
        """Go on where `position` was taken; `kept` is all that `changes` has told until then.

        Raises:
            UsageError: that was with other prompts.
        """
        self._stream.seek(position)
        if self._history is not None:
            self._history.restore(kept)
