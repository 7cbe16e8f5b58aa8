"""The generators' side of the broker: questions for work, answers, returns and renewals."""

from __future__ import annotations

from umbra.proto import messages as m
from umbra.proto.bounds import BATCH
from umbra.proto.net.server import Request
from umbra.proto.records import SampleTask
from umbra.services.buffer.effects import Parked, ParkedRequests
from umbra.services.buffer.samples.evaluation import EVAL_PREFIX, EvalAnswers
from umbra.services.buffer.samples.submit import Submissions
from umbra.services.buffer.samples.trajectories import as_arrived
from umbra.services.buffer.state import RunState

NOTHING = m.SampleLeases(tasks=[])


class GeneratorEndpoint:
    """Answers generators. A request that finds no work is parked, one per generator; a newer one
    replaces it (the generator serves newer weights, say), and the older is answered with nothing.
    """

    def __init__(self, run: RunState) -> None:
        self.closed = False
        self._run = run
        self._pool = run.pool
        self._batches = run.batches
        self._evals = run.evals
        self._outbox = run.outbox
        self._answers = Submissions(
            run.pool, run.batches, run.policy, run.facts, run.counters, run.health.answered
        )
        self._eval_answers = EvalAnswers(
            run.evals.pool, run.batches, run.policy, run.facts, run.counters
        )
        self._parked = ParkedRequests[m.LeaseSamples]()
        self._granted: dict[str, int] = {}  # by generator, its newest question that got work
        self._served_at = (-1, -1, -1)  # openings and version when the parked were last looked at

    def lease(self, request: Request, body: m.LeaseSamples, now: float) -> None:
        """Lease samples, or park the request."""
        if not self._exists(body.version):
            name, newest = request.header.sender, self._batches.newest
            reason = f"{name} serves version {body.version}, but 0 to {newest} exist"
            self._outbox.refuse(request, "wrong_version", reason, "version")
            return
        if tasks := self._grant(request, body.version, body.capacity, now):
            more = self._evals.waits_for(body.version)
            self._outbox.reply(request, m.SampleLeases(tasks=tasks, more_pinned=more))
        elif self.closed or body.wait_s <= 0 or body.capacity <= 0:
            self._outbox.reply(request, NOTHING)
        else:
            self._parked.park(Parked(request, body, now + body.wait_s))

    def submit(self, request: Request, body: m.SubmitTrajectories, now: float) -> None:
        """Accept trajectories, name those that are refused, and lease more samples."""
        refused: dict[str, str] = {}
        sender = request.header.sender
        for trajectory, packed in zip(body.trajectories, as_arrived(request), strict=True):
            answers = self._for(trajectory.sample_id)
            reason = answers.submit(trajectory, packed, sender, now)
            if reason is not None:
                refused[trajectory.sample_id] = reason
        accepted = len(body.trajectories) - len(refused)
        tasks: list[SampleTask] = []
        if body.capacity > 0 and self._exists(body.version):
            tasks = self._grant(request, body.version, body.capacity, now)
        more = bool(tasks) and self._evals.waits_for(body.version)
        ack = m.SubmitAck(accepted=accepted, refused=refused, tasks=tasks, more_pinned=more)
        self._outbox.reply(request, ack)

    def hand_back(self, request: Request, body: m.ReturnSamples, _now: float) -> None:
        for returned in body.samples:
            self._for(returned.sample_id).hand_back(returned, request.header.sender)
        self._outbox.reply(request, m.Ok())

    def flush(self, request: Request, body: m.FlushPartials, now: float) -> None:
        """Store partials of samples that go on; name lost leases."""
        sender = request.header.sender
        lost = [
            partial.sample_id
            for partial in body.partials
            if not self._for(partial.sample_id).flush(partial, sender, now)
        ]
        self._outbox.reply(request, m.RenewAck(lost=lost))

    def renew(self, request: Request, body: m.RenewLeases, now: float) -> None:
        """Extend leases; name lost ones."""
        lost: list[str] = []
        for sample_id, attempt in body.leases:
            if not self._for(sample_id).renew(sample_id, attempt, request.header.sender, now):
                lost.append(sample_id)
        self._outbox.reply(request, m.RenewAck(lost=lost))

    def serve(self, now: float) -> None:
        """Retry the parked requests if anything has opened up since the last time."""
        state = (self._pool.openings, self._evals.pool.openings, self._batches.version)
        if state == self._served_at:
            return
        self._served_at = state
        waiting = len(self._parked)
        for question in self._parked.all():
            waiting -= 1
            request, body = question.request, question.body
            tasks = self._take(request, body.version, body.capacity, waiting=waiting, now=now)
            if tasks:
                self._parked.take(question.name)
                more = self._evals.waits_for(body.version)
                self._outbox.reply(request, m.SampleLeases(tasks=tasks, more_pinned=more))

    def expire(self, now: float) -> None:
        for question in self._parked.take_overdue(now):
            self._outbox.reply(question.request, NOTHING)

    def forget(self, name: str) -> None:
        """Refuse the parked request of `name`, which is no member any more."""
        if question := self._parked.take(name):
            self._outbox.refuse_departed(question.request)
        self._granted.pop(name, None)

    def close(self) -> None:
        self.closed = True
        for question in self._parked.take_all():
            self._outbox.reply(question.request, NOTHING)

    def _exists(self, version: int) -> bool:
        """True if such a version of the weights exists; else count it."""
        if 0 <= version <= self._batches.newest:
            return True
        self._run.counters["wrong_version"] += 1
        return False

    def _grant(self, request: Request, version: int, capacity: int, now: float) -> list[SampleTask]:
        """Lease for a new request, which replaces a parked one."""
        if older := self._parked.take(request.header.sender):
            self._outbox.reply(older.request, NOTHING)
        if again := self._answered_before(request):
            return again
        return self._take(request, version, capacity, waiting=len(self._parked), now=now)

    def _take(
        self, request: Request, version: int, capacity: int, *, waiting: int, now: float
    ) -> list[SampleTask]:
        if self.closed or self._run.paused:
            return []
        name, capacity = request.header.sender, min(capacity, BATCH)
        tasks = self._evals.take(name, version, capacity, now)
        if not self._evals.pausing:
            tasks += self._run.leases.take(
                name,
                version=version,
                capacity=capacity - len(tasks),
                waiting=waiting,
                now=now,
            )
        if tasks:
            self._granted[name] = max(request.header.id, self._granted.get(name, 0))
        for task in tasks:
            pool = self._evals.pool if task.pinned_version >= 0 else self._pool
            if task.sample_id in pool.samples:  # else it ended with another of its group just now
                pool.samples[task.sample_id].asked = request.header.id
        return tasks

    def _answered_before(self, request: Request) -> list[SampleTask]:
        """Return what the sender got by this very request, if the answer was lost with the buffer.

        The server recognises resends, but forgets them when the buffer restarts. Request numbers
        count up, so one above all that got work is new.
        """
        number, name = request.header.id, request.header.sender
        if number > self._granted.get(name, number):
            return []
        pinned = self._evals.pool.held.get(name, {}).values()
        others = self._pool.held.get(name, {}).values()
        if name not in self._granted:  # the buffer has started again, or it is the first question
            self._granted[name] = max((s.asked for s in (*pinned, *others)), default=0)
        again = [self._evals.task(sample) for sample in pinned if sample.asked == number]
        return again + [self._pool.task(sample) for sample in others if sample.asked == number]

    def _for(self, sample_id: str) -> Submissions:
        return self._eval_answers if sample_id.startswith(EVAL_PREFIX) else self._answers
