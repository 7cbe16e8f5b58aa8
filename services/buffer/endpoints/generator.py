"""The generators' side of the broker: questions for work, answers, returns and renewals."""

from __future__ import annotations

from umbra.proto.bounds import BATCH
from umbra.proto.messages import (
    FlushPartials,
    LeaseSamples,
    Nack,
    Ok,
    RenewAck,
    RenewLeases,
    ReturnSamples,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
)
from umbra.proto.records import SampleTask
from umbra.services.buffer.endpoints.evaluation import EVAL_PREFIX, EvalAnswers
from umbra.services.buffer.endpoints.parking import Parked, ParkedRequests
from umbra.services.buffer.samples.submissions import Submissions
from umbra.services.buffer.samples.trajectory_store import as_arrived
from umbra.services.buffer.state import RunState
from umbra.services.runtime.net.server import Request

NOTHING = SampleLeases(tasks=[])


class GeneratorEndpoint:
    """Answers generators. A question that finds no work is parked, one per generator: a newer one
    (the generator serves newer weights, say) takes its place, the older is answered with nothing.
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
        self._parked = ParkedRequests[LeaseSamples]()
        self._served_at = (-1, -1, -1)  # openings and version when the parked were last looked at

    def lease(self, request: Request, body: LeaseSamples, now: float) -> None:
        """Hand out work, or park the question."""
        name = request.header.sender
        if older := self._parked.take(name):
            self._outbox.reply(older.request, NOTHING)
        if not 0 <= body.version <= self._batches.newest:
            self._run.counters["wrong_version"] += 1
            reason = f"{name} serves version {body.version}, but 0 to {self._batches.newest} exist"
            self._outbox.reply(request, Nack(code="wrong_version", reason=reason, path="version"))
            return
        if again := self._answered_before(request):
            self._outbox.reply(request, self._answer(again, body.version))
            return
        question = Parked(request, body, now + body.wait_s)
        if not self._give(question, waiting=len(self._parked), now=now):
            if self.closed or body.wait_s <= 0 or body.capacity <= 0:
                self._outbox.reply(request, NOTHING)
            else:
                self._parked.park(question)

    def submit(self, request: Request, body: SubmitTrajectories, now: float) -> None:
        """Take trajectories in; refused ones are named with the reason."""
        refused: dict[str, str] = {}
        sender = request.header.sender
        for trajectory, packed in zip(body.trajectories, as_arrived(request), strict=True):
            answers = self._for(trajectory.sample_id)
            reason = answers.submit(trajectory, packed, sender, now)
            if reason is not None:
                refused[trajectory.sample_id] = reason
        accepted = len(body.trajectories) - len(refused)
        self._outbox.reply(request, SubmitAck(accepted=accepted, refused=refused))

    def hand_back(self, request: Request, body: ReturnSamples, _now: float) -> None:
        """Take samples back."""
        for returned in body.samples:
            self._for(returned.sample_id).hand_back(returned, request.header.sender)
        self._outbox.reply(request, Ok())

    def flush(self, request: Request, body: FlushPartials, now: float) -> None:
        """Keep partials of samples that go on; those whose lease is lost are named."""
        sender = request.header.sender
        lost = [
            partial.sample_id
            for partial in body.partials
            if not self._for(partial.sample_id).flush(partial, sender, now)
        ]
        self._outbox.reply(request, RenewAck(lost=lost))

    def renew(self, request: Request, body: RenewLeases, now: float) -> None:
        """Put off deadlines; leases that are lost are named."""
        lost: list[str] = []
        for sample_id, attempt in body.leases:
            if not self._for(sample_id).renew(sample_id, attempt, request.header.sender, now):
                lost.append(sample_id)
        self._outbox.reply(request, RenewAck(lost=lost))

    def serve(self, now: float) -> None:
        """Look at the parked questions again if anything has opened up since the last time."""
        state = (self._pool.openings, self._evals.pool.openings, self._batches.version)
        if state == self._served_at:
            return
        self._served_at = state
        waiting = len(self._parked)
        for question in self._parked.all():
            waiting -= 1
            if self._give(question, waiting=waiting, now=now):
                self._parked.take(question.name)

    def expire(self, now: float) -> None:
        """Answer the questions whose wait is over."""
        for question in self._parked.take_overdue(now):
            self._outbox.reply(question.request, NOTHING)

    def forget(self, name: str) -> None:
        """`name` is gone: no answer, which its next incarnation might take for its own."""
        self._parked.take(name)

    def close(self) -> None:
        """No more work for anyone."""
        self.closed = True
        for question in self._parked.take_all():
            self._outbox.reply(question.request, NOTHING)

    def _give(self, question: Parked[LeaseSamples], *, waiting: int, now: float) -> bool:
        if self.closed or self._run.pause.is_shut:
            return False
        name, body = question.name, question.body
        capacity = min(body.capacity, BATCH)
        tasks = self._evals.take(name, body.version, capacity, now)
        if not self._evals.pausing:
            tasks += self._run.leases.take(
                name,
                version=body.version,
                capacity=capacity - len(tasks),
                waiting=waiting,
                now=now,
            )
        for task in tasks:
            pool = self._evals.pool if task.pinned_version >= 0 else self._pool
            if task.sample_id in pool.samples:  # else it ended with another of its group just now
                pool.samples[task.sample_id].asked = question.request.header.id
        if tasks:
            self._outbox.reply(question.request, self._answer(tasks, body.version))
        return bool(tasks)

    def _answer(self, tasks: list[SampleTask], version: int) -> SampleLeases:
        return SampleLeases(tasks=tasks, more_pinned=self._evals.waits_for(version))

    def _answered_before(self, request: Request) -> list[SampleTask]:
        """What the sender got by this very question, if the answer was lost with the buffer.

        The sockets' side knows resends by itself, but it forgets them when the buffer starts again.
        """
        number, name = request.header.id, request.header.sender
        pinned = [s for s in self._evals.pool.held.get(name, {}).values() if s.asked == number]
        others = [s for s in self._pool.held.get(name, {}).values() if s.asked == number]
        return [*map(self._evals.task, pinned), *map(self._pool.task, others)]

    def _for(self, sample_id: str) -> Submissions:
        """Who judges what comes back of the sample."""
        return self._eval_answers if sample_id.startswith(EVAL_PREFIX) else self._answers
