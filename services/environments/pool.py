"""Runs environments beside the engine: user code in processes of its own, ours right here.

A reward that raises, hangs or floods memory costs the sample that it was for.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Protocol, TypeVar

from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.environments.loading import load_environment, runs_inline
from umbra.services.environments.protocol import (
    EnvironmentFactory,
    EpisodeOutcome,
    ParsedTurn,
    Row,
    SampleError,
)
from umbra.services.environments.worker import EnvironmentHost
from umbra.services.environments.worker_pool import END_S, WorkerPool
from umbra.services.process.loop_thread import LoopThread

_SLACK_S = 10.0

T = TypeVar("T")


class EnvironmentPool(Protocol):
    """A player of many conversations at once."""

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        """Ask sample `key`'s environment to answer the last of `responses`, or to open.

        At most one play of a sample at a time. The outcome is `Lost` if the conversation has to be
        opened again. With reward_scope = "group", `key` is a group and `responses` has one of each
        sample; so has the answer.
        """
        ...

    def forget(self, key: str) -> None:
        """End the sample; an answer in flight is dropped."""
        ...

    def collect(self) -> list[EpisodeOutcome]: ...

    def close(self) -> None: ...


class Outcomes:
    """Outcomes that other threads deliver, until they are collected; `wake` is called at each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[EpisodeOutcome] = queue.SimpleQueue()
        self._wake = wake

    def deliver(self, outcome: EpisodeOutcome) -> None:
        self._queue.put(outcome)
        self._wake()

    def collect(self) -> list[EpisodeOutcome]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


def open_pool(
    config: EnvironmentConfig, *, wake: Callable[[], None] = lambda: None
) -> EnvironmentPool:
    """Return the pool for an environment; `wake` is called from any thread at each outcome.

    Raises UsageError if it can't be loaded, DeadlineError if that took too long.
    """
    if runs_inline(config):
        return InlinePool(load_environment(config), f"environment {config.kind}")
    return ProcessPool(config, wake=wake)


class InlinePool:
    """Environments that only compute, within the call."""

    def __init__(self, make: EnvironmentFactory, name: str = "environment") -> None:
        self._plays = EnvironmentHost(make, name)
        self._outcomes: list[EpisodeOutcome] = []

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        try:
            outcome = EpisodeOutcome(key, _at_once(self._plays.play(key, row, responses)))
        except SampleError as error:
            outcome = EpisodeOutcome(key, error=str(error))
        self._outcomes.append(outcome)

    def forget(self, key: str) -> None:
        _at_once(self._plays.forget(key))

    def collect(self) -> list[EpisodeOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        pass


class ProcessPool(Outcomes):
    """Environments in processes of their own; arguments and errors as of `open_pool`."""

    def __init__(
        self, config: EnvironmentConfig, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(wake)
        self._thread = LoopThread("environments")
        self._workers = WorkerPool(config, self.deliver)
        try:
            self._thread.wait(self._workers.start(), config.setup_s + _SLACK_S)
        except BaseException:
            self.close()
            raise

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        self._thread.call(self._workers.play, key, row, list(responses))

    def forget(self, key: str) -> None:
        self._thread.call(self._workers.forget, key)

    def close(self) -> None:
        if not self._thread.closed:
            self._thread.wait(self._workers.close(), END_S)
            self._thread.close()


class EnvironmentSet:
    """The environments of a run, by name. Rows name one that there is (`RolloutSettings.of`)."""

    def __init__(self, pools: Mapping[str, EnvironmentPool]) -> None:
        self._pools = pools
        self._homes: dict[str, EnvironmentPool] = {}  # by sample

    @classmethod
    def opened(
        cls,
        environments: Iterable[NamedEnvironment],
        open_one: Callable[[NamedEnvironment], EnvironmentPool],
    ) -> EnvironmentSet:
        """Open a pool of each; if one can't be opened, those before it are closed."""
        with ExitStack() as stack:
            pools: dict[str, EnvironmentPool] = {}
            for environment in environments:
                pools[environment.name] = stack.enter_context(closing(open_one(environment)))
            stack.pop_all()
            return cls(pools)

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        home = self._homes[key] = self._pools[row[ENVIRONMENT]]
        home.play(key, row, responses)

    def forget(self, key: str) -> None:
        if (home := self._homes.pop(key, None)) is not None:
            home.forget(key)

    def collect(self) -> list[EpisodeOutcome]:
        return [outcome for pool in self._pools.values() for outcome in pool.collect()]

    def close(self) -> None:
        with ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.close)


def open_rewards(config: RunConfig, *, wake: Callable[[], None] = lambda: None) -> EnvironmentPool:
    """Return the pool that rewards whole samples; arguments and errors as of `open_pool`."""
    if not config.environments:
        return open_pool(config.environment, wake=wake)
    groups = [section for section in config.environments if section.reward_scope == "group"]
    return EnvironmentSet.opened(groups, lambda section: open_pool(section, wake=wake))


def outcomes_of(
    pool: EnvironmentPool,
    plays: Mapping[str, tuple[Row, Sequence[ParsedTurn | str]]],
    wait: Callable[[], object],
) -> Iterator[EpisodeOutcome]:
    """Play each of `plays` once, by sample or group; yield the outcomes as they come.

    `wait` is called while none is there; each play has a deadline of its own.
    """
    for key, (row, responses) in plays.items():
        pool.play(key, row, responses)
    pending = set(plays)
    while pending:
        for outcome in pool.collect():
            if outcome.key in pending:
                pending.discard(outcome.key)
                pool.forget(outcome.key)
                yield outcome
        if pending:
            wait()


def _at_once(play: Coroutine[Any, Any, T]) -> T:
    try:
        play.send(None)
    except StopIteration as end:
        return end.value
    play.close()
    raise SampleError("an environment that runs inline must not wait")
