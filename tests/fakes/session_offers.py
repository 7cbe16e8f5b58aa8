"""Stands in for the buffer between a generator's sessions and the agents of an env-worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from umbra.proto.records import SessionOffer, SessionTask
from umbra.services.generator.agents.offers import SessionOffers

KEY = "only for workers"


class Offers(SessionOffers):
    """Gives each session that is offered to `take`, once."""

    def __init__(self, take: Callable[[SessionTask], object]) -> None:
        super().__init__("agent")
        self._take = take
        self._given: set[str] = set()

    def send(self, sessions: Sequence[SessionOffer]) -> None:
        url, key = self._endpoint
        for one in sessions:
            if one.session in self._given:
                continue
            self._given.add(one.session)
            task = SessionTask(
                sample_id=one.sample_id,
                attempt=one.attempt,
                url=f"{url}/sessions/{one.session}",
                key=key,
                lease_s=30.0,
            )
            self._take(task)
