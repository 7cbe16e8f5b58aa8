"""Several pools as one: each sample goes to the environment that its row names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing

from umbra.services.config import NamedEnvironment, RunConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.environments.pool import EnvironmentPool, EpisodeOutcome, open_pool
from umbra.services.environments.protocol import Row
from umbra.services.environments.response import Said


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
        """A pool of each; if one can't be opened, those before it are closed."""
        with ExitStack() as opened:
            pools: dict[str, EnvironmentPool] = {}
            for one in environments:
                pools[one.name] = opened.enter_context(closing(open_one(one)))
            opened.pop_all()
            return cls(pools)

    def play(self, key: str, row: Row, responses: Sequence[Said | str]) -> None:
        """As of `EnvironmentPool`."""
        home = self._homes[key] = self._pools[row[ENVIRONMENT]]
        home.play(key, row, responses)

    def forget(self, key: str) -> None:
        """As of `EnvironmentPool`."""
        home = self._homes.pop(key, None)
        if home is not None:
            home.forget(key)

    def collect(self) -> list[EpisodeOutcome]:
        """As of `EnvironmentPool`."""
        return [outcome for pool in self._pools.values() for outcome in pool.collect()]

    def close(self) -> None:
        """Close them all, also if one can't be."""
        with ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.close)


def open_rewards(config: RunConfig, *, wake: Callable[[], None] = lambda: None) -> EnvironmentPool:
    """Where rewards are found for samples that are whole: in the run's environment, or in those of
    several that reward groups.

    Args:
        config: the run.
        wake: called, from any thread, whenever an outcome is there.

    Raises:
        UsageError: a reward can't be loaded.
        DeadlineError: loading it took too long.
    """
    if not config.environments:
        return open_pool(config.environment, wake=wake)
    groups = [one for one in config.environments if one.reward_scope == "group"]
    return EnvironmentSet.opened(groups, lambda one: open_pool(one, wake=wake))


class LimitedPool:
    """A pool with a limit to how many conversations are open at once; the others wait.

    Args:
        pool: where they are played.
        most: how many at once.
    """

    def __init__(self, pool: EnvironmentPool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._open: set[str] = set()
        self._waiting: deque[tuple[str, Row, Sequence[Said | str]]] = deque()

    def play(self, key: str, row: Row, responses: Sequence[Said | str]) -> None:
        """As of `EnvironmentPool`."""
        if key in self._open:
            self._pool.play(key, row, responses)
        else:
            self._waiting.append((key, row, responses))
            self._begin()

    def forget(self, key: str) -> None:
        """As of `EnvironmentPool`."""
        if key in self._open:
            self._open.discard(key)
            self._pool.forget(key)
            self._begin()
        else:
            self._waiting = deque(play for play in self._waiting if play[0] != key)

    def collect(self) -> list[EpisodeOutcome]:
        """As of `EnvironmentPool`."""
        return self._pool.collect()

    def close(self) -> None:
        """As of `EnvironmentPool`."""
        self._pool.close()

    def _begin(self) -> None:
        while self._waiting and len(self._open) < self._most:
            key, row, responses = self._waiting.popleft()
            self._open.add(key)
            self._pool.play(key, row, responses)
