"""Tells the buffer of sessions that wait for the agent of an env-worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from umbra.proto.messages import OfferSessions
from umbra.proto.net.channel import Channel
from umbra.proto.net.portions import portions
from umbra.proto.records import SessionOffer
from umbra.services.config import RunConfig
from umbra.services.environments.agent_workers import offered_name

_ANSWER_S = 60.0


class SessionOffers:
    """Sends offers, from any thread. One that is lost is made again, so no answer is awaited.

    Args:
        environment: what the agents have to be, as env-workers call it.
    """

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._endpoint = ("", "")
        self._channel: Channel | None = None

    @classmethod
    def of(cls, config: RunConfig) -> dict[str, SessionOffers]:
        """Those of the environments that env-workers run, by `offered_name`."""
        remote = [one for one in config.all_environments if one.run_on == "env_worker"]
        return {name: cls(name) for name in map(offered_name, remote)}

    def at(self, url: str, key: str) -> None:
        """The sessions are served at `url`, to who has `key`."""
        self._endpoint = (url, key)

    def connect(self, channel: Channel) -> None:
        """`channel` leads to the buffer from now on."""
        with self._lock:
            self._channel = channel

    def send(self, sessions: Sequence[SessionOffer]) -> None:
        """These sessions wait for an agent."""
        with self._lock:
            channel = self._channel
        if channel is None:
            return  # not in the run yet: they are offered again
        url, key = self._endpoint
        for portion in portions(sessions, lambda _: 0):
            offer = OfferSessions(url=url, key=key, environment=self._environment, sessions=portion)
            channel.request(offer, timeout_s=_ANSWER_S)
