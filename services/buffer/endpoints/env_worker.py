"""The env-workers' side of the broker, and what generators tell of sessions that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from umbra.proto.bounds import BATCH
from umbra.proto.messages import (
    EndSessions,
    LeaseSessions,
    OfferSessions,
    Ok,
    RenewAck,
    RenewLeases,
    SessionLeases,
)
from umbra.proto.net.server import Request
from umbra.services.buffer.endpoints.parking import Parked, ParkedRequests
from umbra.services.buffer.policy.agent_sessions import OpenSession, Room
from umbra.services.buffer.policy.cancellation import Cancellations
from umbra.services.buffer.state import RunState

NOTHING = SessionLeases(tasks=[])


class EnvWorkerEndpoint:
    """Answers env-workers. A question that finds no session is parked, one per worker.

    Args:
        run: the state.
        interrupts: stops samples at their generators.
    """

    def __init__(self, run: RunState, interrupts: Cancellations) -> None:
        self.closed = False
        self._sessions = run.sessions
        self._outbox = run.outbox
        self._interrupts = interrupts
        self._parked = ParkedRequests[LeaseSessions]()

    def offer(self, request: Request, body: OfferSessions, now: float) -> None:
        """A generator has sessions that wait for agents."""
        self._sessions.offer(body, request.header.sender, now)
        self._outbox.reply(request, Ok())

    def lease(self, request: Request, body: LeaseSessions, now: float) -> None:
        """Hand out sessions, or park the question."""
        name = request.header.sender
        if older := self._parked.take(name):
            self._outbox.reply(older.request, NOTHING)
        self._sessions.serving[name] = list(body.environments)
        self._parked.park(Parked(request, body, now + body.wait_s))
        self.serve(now)
        self._answer_overdue(now)

    def end(self, request: Request, body: EndSessions, _now: float) -> None:
        """A worker is done with sessions, or could not begin them."""
        name = request.header.sender
        self._sessions.end(body.leases, name)
        self._sessions.return_unbegun(body.unbegun, name)
        self._outbox.reply(request, Ok())

    def renew(self, request: Request, body: RenewLeases, now: float) -> None:
        """Put off deadlines; leases that are lost are named."""
        name = request.header.sender
        lost = [
            sample_id
            for sample_id, attempt in body.leases
            if not self._sessions.renew(sample_id, attempt, name, now)
        ]
        self._outbox.reply(request, RenewAck(lost=lost))

    def serve(self, now: float) -> None:
        """Look at the parked questions again."""
        if self.closed or not len(self._parked):
            return
        questions = {one.name: one for one in self._parked.all()}
        rooms = {
            name: Room(_rooms(one.body), min(one.body.capacity, BATCH))
            for name, one in questions.items()
        }
        for name, tasks in self._sessions.assign(rooms, now).items():
            self._parked.take(name)
            self._outbox.reply(questions[name].request, SessionLeases(tasks=tasks))

    def expire(self, now: float) -> None:
        """Answer the questions whose wait is over; take back what was not renewed."""
        late = self._sessions.overdue(now)
        self._lose(late, "its env-worker did not answer", lost=True)
        self._answer_overdue(now)

    def take_back(self, name: str, *, lost: bool) -> int:
        """`name` is gone: the samples of its sessions begin anew, its question is not answered."""
        self._parked.take(name)
        self._sessions.serving.pop(name, None)
        held = self._sessions.of(name)
        self._lose(held, f"the env-worker {name} is gone", lost=lost)
        return len(held)

    def close(self, now: float) -> None:
        """No more work for anyone."""
        self.closed = True
        self.expire(now)

    def _answer_overdue(self, now: float) -> None:
        over = self._parked.take_all() if self.closed else self._parked.take_overdue(now)
        for question in over:
            self._outbox.reply(question.request, NOTHING)

    def _lose(self, sessions: Sequence[OpenSession], why: str, *, lost: bool) -> None:
        if sessions:
            self._interrupts.interrupt([session.sample for session in sessions], why)
            self._sessions.lose(sessions, lost=lost)


def _rooms(body: LeaseSessions) -> dict[str, int]:
    """For how many sessions of each of its environments a worker has room."""
    told = body.rooms + [body.capacity] * (len(body.environments) - len(body.rooms))
    return dict(zip(body.environments, told, strict=False))
