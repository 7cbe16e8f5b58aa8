"""The generator's side of its dialogue with the buffer; nothing here blocks but `flush`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError
from umbra.proto.messages import (
    FlushPartials,
    Interrupt,
    LeaseSamples,
    Message,
    RenewAck,
    RenewLeases,
    ReturnedSample,
    ReturnSamples,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
)
from umbra.proto.net.channel import Channel
from umbra.proto.records import SampleTask, Trajectory, array_bytes

WAIT_S = 1.0  # how long the buffer may keep a question for work open
GRACE_S = 60.0  # without an answer for so long, the buffer is gone
# For so long finished samples wait for others to go with them: a message and the commit that it is
# answered after cost as much as a dozen samples.
GATHER_S = 0.02

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

Lease = tuple[str, int]
"""`(sample_id, attempt)`."""


class BufferClient:
    """Asks for samples, delivers trajectories, renews leases. Answers are taken in by `poll`.

    Args:
        channel: to the buffer's data socket.
        wake: set, from other threads, when an answer is there, or anything else to do.
        clock: seconds, monotonic.
        grace_s: seconds that the buffer may be away for.
    """

    def __init__(
        self,
        channel: Channel,
        wake: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
    ) -> None:
        self.refused = 0
        self._channel = channel
        self._wake = wake
        self._clock = clock
        self._grace_s = grace_s
        self._open: list[tuple[Future[Message], Callable[[Future[Message]], object]]] = []
        self._tasks: list[SampleTask] = []
        self._lost: list[Lease] = []
        self._undelivered: dict[str, int] = {}  # sample -> attempt, until the buffer has stored it
        self._gathered: list[Trajectory] = []  # of those, the ones that were not sent yet
        self._send_at = 0.0  # when they are sent
        self._asked: set[int] = set()  # versions named in open questions for work
        self._pinned_to: int | None = None  # version that more samples of an evaluation wait for
        self._renew_at = 0.0
        self._lease_s: float | None = None

    def more_pinned(self, version: int) -> bool:
        """True if the buffer is known to have more samples that are pinned to `version`."""
        return self._pinned_to == version

    def ask(self, capacity: int, version: int) -> None:
        """Ask for up to `capacity` samples, unless that is being asked already.

        New weights are worth a question of their own: the old one may wait for just them.
        """
        if capacity <= 0 or version in self._asked:
            return
        self._asked.add(version)
        body = LeaseSamples(capacity=capacity, version=version, wait_s=WAIT_S)

        def heard(future: Future[Message]) -> None:
            self._granted(version, _answer(future, SampleLeases))

        self._send(body, heard, timeout_s=WAIT_S + self._grace_s)

    def _granted(self, version: int, answer: SampleLeases | SubmitAck | None) -> None:
        self._asked.discard(version)
        self._pinned_to = version if answer is not None and answer.more_pinned else None
        if answer is not None and answer.tasks:
            self._tasks += answer.tasks
            shortest = min(task.lease_s for task in answer.tasks)
            if self._lease_s is None or shortest < self._lease_s:
                self._lease_s = shortest
                self._renew_at = self._clock() + shortest / 3

    def submit(
        self, trajectories: Sequence[Trajectory], capacity: int = 0, version: int = 0
    ) -> None:
        """Deliver finished samples, those of `GATHER_S` together; a lone one goes at once.

        What is sent asks for up to `capacity` samples too, as `ask` does, but is answered at once:
        `ask` again if none come. Call it after every step, also without any sample; `wait` and
        `flush` send at once what there is.
        """
        if trajectories:
            self._gathered += trajectories
            self._undelivered.update((t.sample_id, t.attempt) for t in trajectories)
        if self._gathered and self._clock() >= self._send_at:
            self._send_at = self._clock() + GATHER_S
            self.deliver(capacity, version)

    def deliver(self, capacity: int = 0, version: int = 0) -> None:
        """Send the gathered samples now, with a question as that of `submit`."""
        gathered, self._gathered = self._gathered, []
        for portion in portions(gathered, array_bytes):
            leases = [(t.sample_id, t.attempt) for t in portion]
            asks = capacity > 0 and version not in self._asked
            body = SubmitTrajectories(trajectories=portion)
            if asks:
                self._asked.add(version)
                body = SubmitTrajectories(trajectories=portion, capacity=capacity, version=version)
            self._send(body, partial(self._stored, leases, version if asks else None))

    def _stored(self, leases: list[Lease], asked: int | None, future: Future[Message]) -> None:
        for sample_id, attempt in leases:
            if self._undelivered.get(sample_id) == attempt:
                del self._undelivered[sample_id]
        answer = future.result()  # undeliverable work ends this process
        if asked is not None:
            self._granted(asked, answer if isinstance(answer, SubmitAck) else None)
        if isinstance(answer, SubmitAck):
            self.refused += len(answer.refused)
            for sample_id, reason in answer.refused.items():
                log.info("the buffer refused %s: %s", sample_id, reason)

    def give_back(self, samples: Sequence[ReturnedSample]) -> None:
        """Hand samples back, unfinished or failed."""
        for portion in portions(samples, lambda sample: array_bytes(sample.partial)):
            self._send(ReturnSamples(samples=portion), lambda future: _answer(future, Message))

    def save(self, partials: Sequence[Trajectory]) -> None:
        """Send partials of samples that go on, for the buffer to keep."""
        for portion in portions(partials, array_bytes):
            held = [(t.sample_id, t.attempt) for t in portion]
            self._send(FlushPartials(partials=portion), partial(self._renewed, held))

    def interrupts(self) -> list[Interrupt]:
        """Return the interrupts since the last call."""
        found: list[Interrupt] = []
        while not self._channel.pushes.empty():
            message = self._channel.pushes.get_nowait()
            if isinstance(message, Interrupt):
                found.append(message)
        return found

    def renew(self, leases: Callable[[], Sequence[Lease]]) -> None:
        """Renew the leases, those of undelivered samples included, every third of a lease."""
        now = self._clock()
        if self._lease_s is None or now < self._renew_at:
            return
        self._renew_at = now + self._lease_s / 3
        held = [*leases(), *self._undelivered.items()]
        for portion in portions(held, lambda _: 0, LEASES):
            renewed = partial(self._renewed, portion)
            self._send(RenewLeases(leases=portion), renewed, timeout_s=self._lease_s)

    def _renewed(self, held: list[Lease], future: Future[Message]) -> None:
        answer = _answer(future, RenewAck)
        if answer is not None and answer.lost:
            attempts = dict(held)
            self._lost += [(s, attempts[s]) for s in answer.lost if s in attempts]

    def poll(self) -> tuple[list[SampleTask], list[Lease]]:
        """New samples to work on, and leases that were lost, since the last call.

        Raises:
            UmbraError: the buffer refused a request or did not store what was delivered.
        """
        still_open = []
        done = []
        for entry in self._open:
            (done if entry[0].done() else still_open).append(entry)
        self._open = still_open
        for future, handle in done:
            handle(future)
        tasks, self._tasks = self._tasks, []
        lost, self._lost = self._lost, []
        return tasks, lost

    def wait(self, timeout_s: float) -> None:
        self.deliver()
        self._wake.wait(timeout_s)
        self._wake.clear()

    def flush(self, deadline_s: float) -> list[SampleTask]:
        """Wait until everything is answered, or the deadline; return samples that still came."""
        self.deliver()
        deadline = Deadline(deadline_s, clock=self._clock)
        late, _ = self.poll()
        while self._open and not deadline.passed:
            self.wait(min(deadline.left_s, 0.1))
            late += self.poll()[0]
        if self._open:
            log.warning("%d requests to the buffer stay unanswered", len(self._open))
        return late

    def _send(
        self,
        body: Message,
        handle: Callable[[Future[Message]], object],
        timeout_s: float | None = None,
    ) -> None:
        future = self._channel.request(
            body, timeout_s=timeout_s or self._grace_s, on_done=lambda _future: self._wake.set()
        )
        self._open.append((future, handle))


def _answer(future: Future[Message], cls: type[M]) -> M | None:
    """Return the answer, or None if none came in time; the next question makes up for it."""
    try:
        answer = future.result()
    except DeadlineError as error:
        log.warning("%s", error)
        return None
    return answer if isinstance(answer, cls) else None
