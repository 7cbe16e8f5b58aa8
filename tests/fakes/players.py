"""A pool of environments in processes, played from a test."""

import threading
from typing import Any

from fakes.slowness import limit

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.pool import ProcessPool
from umbra.services.environments.protocol import EpisodeOutcome


class Player:
    def __init__(self, config: EnvironmentConfig) -> None:
        self._event = threading.Event()
        self.pool = ProcessPool(config, wake=self._event.set)
        self.close = self.pool.close

    def outcomes(self, count: int) -> dict[str, EpisodeOutcome]:
        found: dict[str, EpisodeOutcome] = {}
        while len(found) < count:
            assert self._event.wait(limit(60))
            self._event.clear()
            found |= {outcome.key: outcome for outcome in self.pool.collect()}
        return found

    def play(self, key: str, *responses: str, **row: Any) -> EpisodeOutcome:
        self.pool.play(key, {"prompt": "p", **row}, list(responses))
        return self.outcomes(1)[key]
