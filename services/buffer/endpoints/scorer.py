"""The scorers' side of the broker: questions for trajectories, scores and renewals."""

from __future__ import annotations

from umbra.proto import messages as m
from umbra.proto.bounds import BATCH
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import Parked, ParkedRequests
from umbra.services.buffer.samples.trajectories import as_arrived
from umbra.services.buffer.state import RunState

NOTHING = m.ScoringLeases(tasks=[])


class ScorerEndpoint:
    """Answers scorers. A request that finds no work is parked, one per scorer."""

    def __init__(self, run: RunState) -> None:
        self.closed = False
        self._scoring = run.scoring
        self._stages = run.buffer.stages
        self._counters = run.counters
        self._outbox = run.outbox
        self._parked = ParkedRequests[m.LeaseScoring]()

    def lease(self, request: Request, body: m.LeaseScoring, now: float) -> None:
        """Lease trajectories, or park the request."""
        if older := self._parked.take(request.header.sender):
            self._outbox.reply(older.request, NOTHING)
        if body.stage not in self._stages:
            known = ", ".join(self._stages) or "none"
            reason = f"the run has no stage {body.stage!r}; buffer.stages has {known}"
            self._counters["unknown_stage"] += 1
            self._outbox.refuse(request, "unknown_stage", reason, "stage")
            return
        self._scoring.serving[request.header.sender] = body.stage
        self._parked.park(Parked(request, body, now + body.wait_s))
        self.serve(now)
        self.expire(now)

    def submit(self, request: Request, body: m.SubmitScores, now: float) -> None:
        """Accept scores; name those that are refused."""
        found = list(zip(body.scores, as_arrived(request), strict=True))
        refused = self._scoring.submit(body.stage, found, request.header.sender, now)
        accepted = len(body.scores) - len(refused)
        self._outbox.reply(request, m.SubmitAck(accepted=accepted, refused=refused))

    def renew(self, request: Request, body: m.RenewLeases, now: float) -> None:
        """Extend leases; name lost ones."""
        holder = request.header.sender
        lost = [
            sample_id
            for sample_id, attempt in body.leases
            if not self._scoring.renew(sample_id, attempt, holder, now)
        ]
        self._outbox.reply(request, m.RenewAck(lost=lost))

    def serve(self, now: float) -> None:
        for question in self._parked.all():
            body = question.body
            if self.closed or not self._scoring.waiting(body.stage):
                continue
            tasks = self._scoring.take(question.name, body.stage, min(body.capacity, BATCH), now)
            if tasks:
                self._parked.take(question.name)
                self._outbox.reply(question.request, m.ScoringLeases(tasks=tasks))

    def expire(self, now: float) -> None:
        """Requeue expired leases; answer overdue requests."""
        self._scoring.expire(now)
        over = self._parked.take_all() if self.closed else self._parked.take_overdue(now)
        for question in over:
            self._outbox.reply(question.request, NOTHING)

    def take_back(self, name: str, *, lost: bool) -> int:
        """Requeue the work of `name`, which has left."""
        if question := self._parked.take(name):
            self._outbox.refuse_departed(question.request)
        self._scoring.serving.pop(name, None)
        return self._scoring.take_all_back(name, lost=lost)

    def close(self, now: float) -> None:
        self.closed = True
        self.expire(now)
