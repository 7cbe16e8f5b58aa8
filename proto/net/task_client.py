"""The side of a generator or scorer in its dialogue with the buffer; nothing blocks but `flush`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import filterfalse

from msgspec.structs import replace

from umbra.proto import messages as m
from umbra.proto.bounds import LEASES, SPANS
from umbra.proto.codec import portions
from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError
from umbra.proto.net.io_thread import Channel
from umbra.proto.net.session import GRACE_S
from umbra.proto.records import SAMPLE, Score, Task, Trajectory, array_bytes

WAIT_S = 1.0  # how long the buffer may keep a question for work open
# For so long results wait for others to go with them: a message and the commit that it is answered
# after cost as much as a dozen samples.
GATHER_S = 0.02
MIXED = f"tokens of more than {SPANS} versions: lower buffer.max_staleness"

log = logging.getLogger(__name__)

Lease = tuple[str, int]  # (sample_id, attempt)
Result = Trajectory | Score


class TaskClient:
    """Asks for tasks of one kind, delivers results, renews leases. `poll` takes the answers in."""

    def __init__(
        self,
        channel: Channel,
        wake: threading.Event,  # set, from other threads, when there is anything to do
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,  # that the buffer may be away for
        kind: str = SAMPLE,  # of the tasks, or a scoring stage
        gather_s: float = GATHER_S,
    ) -> None:
        self.accepted = self.refused = 0
        self.kind = kind
        self._gather_s = gather_s
        self._channel = channel
        self._wake = wake
        self._clock = clock
        self._grace_s = grace_s
        # Requests without an answer; the leases that they name, the version if they ask for tasks.
        self._open: list[tuple[Future[m.Message], m.Message, list[Lease], int | None]] = []
        self._tasks: list[Task] = []
        self._lost: list[Lease] = []
        self._undelivered: dict[str, int] = {}  # sample -> attempt, until the buffer has stored it
        self._gathered: list[Result] = []  # of those, the ones that were not sent yet
        self._send_at = 0.0  # when they are sent
        self._asked: set[int] = set()  # versions named in open questions for work
        self._pinned_to: int | None = None  # version that more samples of an evaluation wait for
        self._renew_at = self._lease_s = math.inf

    def more_pinned(self, version: int) -> bool:
        """True if the buffer is known to have more samples that are pinned to `version`."""
        return self._pinned_to == version

    def ask(self, capacity: int, version: int = 0) -> None:
        """Ask for up to `capacity` tasks, unless that is being asked already.

        New weights are worth a question of their own: the old one may wait for just them.
        """
        if capacity > 0 and version not in self._asked:
            body = m.LeaseTasks(kind=self.kind, capacity=capacity, version=version, wait_s=WAIT_S)
            self._send(body, asked=version, timeout_s=WAIT_S + self._grace_s)

    def submit(self, results: Sequence[Result], capacity: int = 0, version: int = 0) -> None:
        """Deliver finished tasks, gathered for `gather_s`; a lone one goes at once.

        The message asks for up to `capacity` samples too, as `ask` does, but is answered at once:
        `ask` again if none come. Call it after every step, also without any sample; `wait` and
        `flush` send the gathered tasks at once.
        """
        mixed = [
            m.ReturnedSample(sample_id=name, attempt=attempt, reason=MIXED, failed=True)
            for name, attempt in map(_lease, filterfalse(_fits, results))
        ]
        if mixed:
            log.warning("%d samples fail: %s", len(mixed), MIXED)
            self.give_back(mixed)
            results = list(filter(_fits, results))
        self._gathered += results
        self._undelivered.update(map(_lease, results))
        if self._gathered and self._clock() >= self._send_at:
            self._send_at = self._clock() + self._gather_s
            self.deliver(capacity, version)

    def deliver(self, capacity: int = 0, version: int = 0) -> None:
        """Send the gathered results now; with `capacity` ask for samples too, as `submit` does."""
        gathered, self._gathered = self._gathered, []
        for portion in portions(gathered, _bytes):
            self.deliver_together(portion, capacity, version)

    def deliver_together(
        self, results: Sequence[Result], capacity: int = 0, version: int = 0
    ) -> None:
        """Send `results` now, in one message: a group scored as a whole needs that."""
        leases = list(map(_lease, results))
        self._undelivered.update(leases)
        asks = capacity > 0 and version not in self._asked
        body = m.SubmitResults(
            trajectories=[result for result in results if isinstance(result, Trajectory)],
            scores=[result for result in results if isinstance(result, Score)],
            capacity=capacity if asks else 0,
            version=version,
        )
        self._send(body, leases, asked=version if asks else None)

    def give_back(self, samples: Sequence[m.ReturnedSample]) -> None:
        samples = [
            sample if _fits(sample.partial) else replace(sample, partial=None) for sample in samples
        ]
        for portion in portions(samples, lambda sample: array_bytes(sample.partial)):
            self._send(m.ReturnTasks(samples=portion))

    def save(self, partials: Sequence[Trajectory]) -> None:
        for portion in portions(list(filter(_fits, partials)), array_bytes):
            self._send(m.RenewLeases(partials=portion), map(_lease, portion))

    def interrupts(self) -> list[m.Interrupt]:
        pushes = self._channel.pushes
        messages = [pushes.get_nowait() for _ in range(pushes.qsize())]
        return [message for message in messages if isinstance(message, m.Interrupt)]

    def renew(self, leases: Callable[[], Sequence[Lease]]) -> None:
        """Renew the leases, also of undelivered samples, every third of a lease."""
        if (now := self._clock()) < self._renew_at:
            return
        self._renew_at = now + self._lease_s / 3
        for portion in portions([*leases(), *self._undelivered.items()], lambda _: 0, LEASES):
            self._send(m.RenewLeases(leases=portion), portion, timeout_s=self._lease_s)

    def poll(self) -> tuple[list[Task], list[Lease]]:
        """Return new tasks to work on, and leases that were lost, since the last call.

        UmbraError if the buffer refused a request or did not store a delivery.
        """
        done = [request for request in self._open if request[0].done()]
        for request in done:
            self._open.remove(request)
        for request in done:
            self._answered(*request)
        (tasks, self._tasks), (lost, self._lost) = (self._tasks, []), (self._lost, [])
        return tasks, lost

    def wait(self, timeout_s: float) -> None:
        self.deliver()
        self._wake.wait(timeout_s)
        self._wake.clear()

    def flush(self, deadline_s: float) -> list[Task]:
        """Wait until everything is answered, or the deadline; return tasks that still came."""
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
        body: m.Message,
        leases: Iterable[Lease] = (),
        *,
        asked: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if asked is not None:
            self._asked.add(asked)
        future = self._channel.request(
            body, timeout_s=timeout_s or self._grace_s, on_done=lambda _future: self._wake.set()
        )
        self._open.append((future, body, list(leases), asked))

    def _answered(
        self, future: Future[m.Message], body: m.Message, leases: list[Lease], asked: int | None
    ) -> None:
        is_delivery = isinstance(body, m.SubmitResults)
        if is_delivery:
            for sample_id, attempt in leases:
                if self._undelivered.get(sample_id) == attempt:
                    del self._undelivered[sample_id]
        try:
            answer = future.result()
        except DeadlineError as error:
            if is_delivery:
                raise  # undeliverable work ends this process; the next question makes up for others
            log.warning("%s", error)
            answer = None
        if not isinstance(answer, m.TaskLeases):
            answer = m.TaskLeases()
        if asked is not None:
            self._asked.discard(asked)
            self._pinned_to = asked if answer.more_pinned else None
            self._tasks += answer.tasks
            shortest = min((task.lease_s for task in answer.tasks), default=math.inf)
            if shortest < self._lease_s:
                self._lease_s, self._renew_at = shortest, self._clock() + shortest / 3
        self.accepted += answer.accepted
        self.refused += len(answer.refused)
        for sample_id, reason in answer.refused.items():
            log.info("the buffer refused %s: %s", sample_id, reason)
        if answer.lost:
            attempts = dict(leases)
            self._lost += [(name, attempts[name]) for name in answer.lost if name in attempts]


def _lease(result: Result) -> Lease:
    return result.sample_id, result.attempt


def _fits(result: Result | None) -> bool:
    """Return whether a message can hold it: no line has tokens of more than `SPANS` versions."""
    lines = (result, *result.branches) if isinstance(result, Trajectory) else ()
    return all(len(line.spans) <= SPANS for line in lines)


def _bytes(result: Result) -> int:
    if isinstance(result, Trajectory):
        return array_bytes(result)
    return len(result.logprobs or b"")
