"""Sessions of agents that env-workers run: which wait, who has which, until when. No IO, no clock.

A session belongs to a sample that a generator holds by the lease `(sample_id, attempt)`, and ends
with that lease. It is given to one worker, once: an agent that began cannot be begun elsewhere. So
when a worker is lost, the sample is taken back from its generator, and begins anew in another
session under its next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from umbra.proto.messages import OfferSessions
from umbra.proto.records import SessionTask
from umbra.services.buffer.samples.groups import Sample, State
from umbra.services.buffer.samples.pool import SamplePool

Lease = tuple[str, int]
"""`(sample_id, attempt)`."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """One session. Times are seconds of the broker's clock."""

    pool: SamplePool
    sample: Sample
    attempt: int  # of the generator's lease
    offered_at: float
    url: str = ""  # empty if it was given out before this buffer started
    key: str = ""
    environment: str = ""
    worker: str = ""  # who runs its agent; empty while it waits
    deadline: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether its generator still has the lease on its sample."""
        return self.sample.state is State.GENERATING and self.sample.attempt == self.attempt


@dataclass(frozen=True, slots=True)
class Room:
    """What an env-worker has, and for how many more sessions."""

    environments: Mapping[str, int]  # by name, for how many of its sessions
    capacity: int  # for how many of all


class AgentSessions:
    """Gives sessions to env-workers.

    Args:
        pools: of the samples; earlier ones are looked into first.
        lease_s: seconds until a worker's lease that is not renewed expires.
        counters: of the broker.
    """

    def __init__(
        self, pools: Sequence[SamplePool], *, lease_s: float, counters: Counter[str]
    ) -> None:
        self.serving: dict[str, list[str]] = {}  # by worker, the environments that it asked for
        self._pools = pools
        self._lease_s = lease_s
        self._counters = counters
        self._open: dict[str, OpenSession] = {}  # by sample
        self._waiting: dict[str, OpenSession] = {}  # the same, in order

    def offer(self, body: OfferSessions, generator: str, now: float) -> None:
        """Sessions of `generator` wait for agents; those that are known stay as they are."""
        for one in body.sessions:
            url = f"{body.url}/sessions/{one.session}"
            known = self._open.get(one.sample_id)
            if known is not None and (known.attempt, known.url) == (one.attempt, url):
                continue
            found = self._leased(one.sample_id, one.attempt, generator)
            if found is None:
                self._counters["late_sessions"] += 1
                continue
            self._forget(one.sample_id)
            session = OpenSession(*found, one.attempt, now, url, body.key, body.environment)
            self._open[one.sample_id] = self._waiting[one.sample_id] = session

    def assign(self, rooms: Mapping[str, Room], now: float) -> dict[str, list[SessionTask]]:
        """Leases on sessions that wait, by worker: each goes to whom has the most room for it."""
        left = {name: room.capacity for name, room in rooms.items() if room.capacity > 0}
        each = {name: dict(rooms[name].environments) for name in left}
        given: dict[str, list[SessionTask]] = {}
        for session in list(self._waiting.values()) if left else ():
            if not session.is_open:
                self._forget(session.sample.sample_id)
                continue
            able = [name for name in left if each[name].get(session.environment, 0) > 0]
            worker = max(able, key=lambda name: left[name], default=None)
            if worker is None:
                continue
            given.setdefault(worker, []).append(self._lease(session, worker, now))
            left[worker] -= 1
            each[worker][session.environment] -= 1
            if not left[worker]:
                del left[worker]
            if not left:
                break
        return given

    def renew(self, sample_id: str, attempt: int, worker: str, now: float) -> bool:
        """Put off the deadline of a lease; False if it is not `worker`'s any more.

        A session that is not known was given out before the buffer started again: whoever works on
        it has it.
        """
        session = self._open.get(sample_id)
        if session is None and (found := self._leased(sample_id, attempt)) is not None:
            session = OpenSession(*found, attempt, now, worker=worker)
            self._open[sample_id] = session
        if (
            session is None
            or not session.is_open
            or (session.attempt, session.worker)
            != (
                attempt,
                worker,
            )
        ):
            return False
        session.deadline = now + self._lease_s
        return True

    def end(self, leases: Iterable[Lease], worker: str) -> None:
        """`worker` is done with these; what became of them the generators say."""
        for session in self._held(leases, worker):
            self._forget(session.sample.sample_id)

    def return_unbegun(self, leases: Iterable[Lease], worker: str) -> None:
        """`worker` could not begin these: they wait again."""
        for session in self._held(leases, worker):
            if session.is_open and session.url:
                session.worker = ""
                self._waiting[session.sample.sample_id] = session
                self._counters["sessions_unbegun"] += 1

    def overdue(self, now: float) -> list[OpenSession]:
        """Sessions whose worker has not renewed in time; those that are over are dropped."""
        for session in [one for one in self._open.values() if not one.is_open]:
            self._forget(session.sample.sample_id)
        return [one for one in self._open.values() if one.worker and one.deadline <= now]

    def of(self, worker: str) -> list[OpenSession]:
        """The sessions that `worker` has."""
        return [one for one in self._open.values() if one.worker == worker and one.is_open]

    def lose(self, sessions: Iterable[OpenSession], *, lost: bool) -> None:
        """Nobody works on these any more: their samples begin anew. `lost` as of `take_back`."""
        for session in sessions:
            self._forget(session.sample.sample_id)
            if session.is_open:  # else it ended with another of its group just now
                session.pool.take_back(session.sample, lost=lost)
                self._counters["sessions_lost"] += lost

    def waiting(self) -> list[OpenSession]:
        """Those that no worker has, longest first."""
        return [one for one in self._waiting.values() if one.is_open]

    def counts(self) -> dict[str, int]:
        """How many sessions wait and run, and how many workers there are; empty without any."""
        if not self._open and not self.serving:
            return {}
        waiting = len(self._waiting)
        running = len(self._open) - waiting
        return {"waiting": waiting, "running": running, "workers": len(self.serving)}

    def _lease(self, session: OpenSession, worker: str, now: float) -> SessionTask:
        del self._waiting[session.sample.sample_id]
        session.worker = worker
        session.deadline = now + self._lease_s
        return SessionTask(
            sample_id=session.sample.sample_id,
            attempt=session.attempt,
            url=session.url,
            key=session.key,
            environment=session.environment,
            lease_s=self._lease_s,
        )

    def _leased(
        self, sample_id: str, attempt: int, generator: str | None = None
    ) -> tuple[SamplePool, Sample] | None:
        """The sample and its pool, if a generator (that one, if it is named) has this lease."""
        for pool in self._pools:
            sample = pool.samples.get(sample_id)
            if sample is None or (sample.state, sample.attempt) != (State.GENERATING, attempt):
                continue
            if generator in (None, sample.holder):
                return pool, sample
        return None

    def _held(self, leases: Iterable[Lease], worker: str) -> list[OpenSession]:
        found = [(self._open.get(sample_id), attempt) for sample_id, attempt in leases]
        return [
            session
            for session, attempt in found
            if session is not None and (session.attempt, session.worker) == (attempt, worker)
        ]

    def _forget(self, sample_id: str) -> None:
        self._open.pop(sample_id, None)
        self._waiting.pop(sample_id, None)
