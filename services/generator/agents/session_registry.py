"""All sessions of a generator: those that wait for an agent, those under way, and the last ones."""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from umbra.services.environments.time_limits import TimeLimits
from umbra.services.generator.agents.session import AgentSession
from umbra.services.http import ApiError

_REMEMBERED = 4096  # sessions that are over, so that late requests learn why


class SessionRegistry:
    """Hands samples out to agents. Not thread-safe.

    Args:
        limits: how long agents may be silent for.
        new_id: makes unguessable names.
        branches: whether agents may change the history of a session.
    """

    def __init__(
        self,
        limits: TimeLimits,
        new_id: Callable[[], str] = lambda: secrets.token_urlsafe(18),
        *,
        branches: bool = False,
    ) -> None:
        self._limits = limits
        self._branches = branches
        self._new_id = new_id
        self._by_id: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}
        self._waiting: deque[AgentSession] = deque()
        self._over: OrderedDict[str, AgentSession] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Samples that no agent has taken."""
        return sum(not session.begun for session in self._by_id.values())

    def open(self, key: str, row: dict[str, Any]) -> AgentSession:
        """A session for the sample `key`, which nobody works on yet; an older one of it is over."""
        self.close(key, over("its sample began anew in another session"))
        session = AgentSession(self._new_id(), key, row, self._limits, branches=self._branches)
        self._by_id[session.id] = self._by_key[key] = session
        self._waiting.append(session)
        return session

    def lease(self, now: float, lease_s: float = math.inf) -> AgentSession | None:
        """The session that has waited longest for an agent; None if there is none."""
        while self._waiting:
            session = self._waiting.popleft()
            if session.over is None and not session.begun:
                session.begin(now, lease_s)
                return session
        return None

    def find(self, session_id: str) -> AgentSession:
        """The session of that id, over or not.

        Raises:
            ApiError: there is none.
        """
        found = self._by_id.get(session_id) or self._over.get(session_id)
        if found is None:
            raise ApiError(
                "there is no such session here: POST /sessions gives one",
                status=404,
                code="session_not_found",
            )
        return found

    def of(self, key: str) -> AgentSession | None:
        """The session of the sample `key`."""
        return self._by_key.get(key)

    def close(self, key: str, why: ApiError | None = None) -> None:
        """The sample is over."""
        session = self._by_key.pop(key, None)
        if session is None:
            return
        del self._by_id[session.id]
        self._over[session.id] = session
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        if why is None:
            taken_back = session.verdict or "its sample was taken back"
            why = over("it has its reward" if session.reward else taken_back)
        session.end(why)

    def close_all(self, why: str) -> None:
        for key in list(self._by_key):
            self.close(key, over(why))

    def renew(self, session_ids: Iterable[str], now: float, lease_s: float) -> list[str]:
        """Renew the leases of these sessions; return those that are over or unknown."""
        lost: list[str] = []
        for session_id in session_ids:
            if session_id in self._by_id:
                self._by_id[session_id].leased_until = now + lease_s
            else:
                lost.append(session_id)
        return lost

    def expired(self, now: float) -> list[AgentSession]:
        """The sessions without a reward whose leases were not renewed in time."""
        held = self._by_id.values()
        return [one for one in held if one.leased_until <= now and one.reward is None]

    def overdue(self, now: float) -> list[AgentSession]:
        """The sessions whose agents have been silent for too long."""
        return [session for session in self._by_id.values() if session.deadline <= now]


def over(why: str) -> ApiError:
    return ApiError(f"this session is over: {why}", status=410, code="session_over")
