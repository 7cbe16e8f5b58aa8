"""The env-worker's loop: leases sessions as there is room, renews them, tells what has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from umbra.proto.bounds import LEASES
from umbra.proto.errors import DeadlineError, PeerLostError
from umbra.proto.messages import (
    EndSessions,
    LeaseSessions,
    Message,
    Ok,
    RenewAck,
    RenewLeases,
    SessionLeases,
)
from umbra.proto.net.portions import portions
from umbra.proto.net.session import Session
from umbra.proto.records import SessionTask
from umbra.services.env_worker.host import EndedSession, Lease

WAIT_S = 1.0  # how long the buffer may keep a question open
ANSWER_S = 60.0
LOOK_S = 0.1
UNREACHABLE_S = 60.0  # without any session of which the generator can be reached
PAUSE_S = 1.0  # before the next question, after one that could not be reached

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class Agents(Protocol):
    """What the loop asks of `AgentHost`."""

    def begin(self, task: SessionTask) -> None: ...
    def forget(self, leases: Sequence[Lease]) -> None: ...
    def ended(self) -> list[EndedSession]: ...


class EnvWorkerLoop:
    """Serves the environments of a run until the session stops.

    Args:
        session: membership in the run.
        host: runs the agents.
        rooms: the environments that it has, and how many sessions of each at once.
        capacity: sessions of all at once.
        wake: set, from other threads, when there is something to do.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        session: Session,
        host: Agents,
        rooms: Mapping[str, int],
        capacity: int,
        wake: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._host = host
        self._rooms = dict(rooms)
        self._capacity = capacity
        self._wake = wake
        self._clock = clock
        self._held: dict[Lease, str] = {}  # the environment of each
        self._open: list[tuple[Future[Message], Callable[[Future[Message]], None]]] = []
        self._asking = False
        self._ask_at = 0.0
        self._lease_s = 0.0
        self._renew_at = 0.0
        self._unreachable_since: float | None = None
        self._ended = self._failed = 0

    def run(self) -> None:
        """Turn until asked to stop; what is unfinished goes to others when this process leaves.

        Raises:
            PeerLostError: the generators' sessions cannot be reached from here.
        """
        while not self._session.stopping.is_set():
            self.turn()
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def turn(self) -> None:
        """Do what there is to do; nothing here waits."""
        answered = [entry for entry in self._open if entry[0].done()]
        self._open = [entry for entry in self._open if not entry[0].done()]
        for future, handle in answered:
            handle(future)
        self._tell_ended()
        self._renew()
        self._ask()
        activity = "running agents" if self._held else "waiting for sessions"
        self._session.progress(activity, 0)
        self._session.stats(
            sessions=float(len(self._held)), ended=float(self._ended), failed=float(self._failed)
        )

    def _ask(self) -> None:
        room = self._capacity - len(self._held)
        if self._asking or room <= 0 or self._clock() < self._ask_at:
            return
        self._asking = True
        used = Counter(self._held.values())
        rooms = {name: most - used[name] for name, most in self._rooms.items()}
        question = LeaseSessions(
            environments=list(rooms), rooms=list(rooms.values()), capacity=room, wait_s=WAIT_S
        )
        self._send(question, self._granted, WAIT_S + ANSWER_S)

    def _granted(self, future: Future[Message]) -> None:
        self._asking = False
        answer = _answer(future, SessionLeases)
        if answer is None or not answer.tasks:
            return
        shortest = min(task.lease_s for task in answer.tasks)
        if not self._lease_s or shortest < self._lease_s:
            self._lease_s = shortest
            self._renew_at = self._clock() + shortest / 3
        for task in answer.tasks:
            self._held[task.sample_id, task.attempt] = task.environment
            self._host.begin(task)

    def _tell_ended(self) -> None:
        ended = self._host.ended()
        if not ended:
            return
        unbegun: list[Lease] = []
        done: list[Lease] = []
        for one in ended:
            self._held.pop(one.lease, None)
            if one.unreachable:
                self._missed(one.unreachable)
                unbegun.append(one.lease)
            else:
                self._unreachable_since = None
                done.append(one.lease)
                self._ended += 1
                self._failed += bool(one.failure)
        for portion in portions(done, lambda _: 0, LEASES):
            self._send(EndSessions(leases=portion), _told)
        for portion in portions(unbegun, lambda _: 0, LEASES):
            self._send(EndSessions(leases=[], unbegun=portion), _told)
        self._session.progress("running agents", len(done))

    def _missed(self, why: str) -> None:
        """A session could not be begun: its generator has ended, or this host does not reach it."""
        now = self._clock()
        self._ask_at = now + PAUSE_S
        if self._unreachable_since is None:
            self._unreachable_since = now
            log.warning("a session cannot be begun: %s", why)
        elif now - self._unreachable_since > UNREACHABLE_S:
            raise PeerLostError(
                f"no session could be begun for {UNREACHABLE_S:g} s: {why}; set generator.serve "
                "to an address that this machine reaches"
            )

    def _renew(self) -> None:
        now = self._clock()
        if not self._held or now < self._renew_at:
            return
        self._renew_at = now + self._lease_s / 3
        for portion in portions(sorted(self._held), lambda _: 0, LEASES):
            attempts = dict(portion)
            self._send(
                RenewLeases(leases=portion),
                lambda future, attempts=attempts: self._renewed(attempts, future),
            )

    def _renewed(self, attempts: dict[str, int], future: Future[Message]) -> None:
        answer = _answer(future, RenewAck)
        lost = [] if answer is None else [(one, attempts[one]) for one in answer.lost]
        gone = [lease for lease in lost if lease in self._held]
        for lease in gone:
            del self._held[lease]
        self._host.forget(gone)

    def _send(
        self, body: Message, handle: Callable[[Future[Message]], None], timeout_s: float = ANSWER_S
    ) -> None:
        future = self._session.data.request(
            body, timeout_s=timeout_s, on_done=lambda _: self._wake.set()
        )
        self._open.append((future, handle))


def _told(future: Future[Message]) -> None:
    _answer(future, Ok)


def _answer(future: Future[Message], kind: type[M]) -> M | None:
    """The answer; None if there was none in time, which the next question makes up for."""
    try:
        answer = future.result()
    except DeadlineError as error:
        log.warning("%s", error)
        return None
    return answer if isinstance(answer, kind) else None
