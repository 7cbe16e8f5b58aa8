"""The side of generators and scorers: questions for tasks, results, renewals and returns."""

from __future__ import annotations

import logging
import math
from collections import Counter

from umbra.proto import messages as m
from umbra.proto.bounds import BATCH
from umbra.proto.messages import ReturnedSample
from umbra.proto.net.server import Request
from umbra.proto.records import SAMPLE, Trajectory, array_bytes
from umbra.services.buffer.effects import NackError, Parked
from umbra.services.buffer.samples.groups import Grant, Sample, State
from umbra.services.buffer.samples.ledger import count_reason
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import (
    MORE_BYTES,
    Packed,
    as_arrived,
    pack,
    size_fault,
)
from umbra.services.buffer.state import RunState
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.config.trajectory_rules import find_fault

MALFORMED = "malformed: "  # begins the reason of such a refusal

log = logging.getLogger(__name__)


class Answers:
    """The check of answers: sound ones, in time and asked for, are accepted, others counted.

    Tokens of a pinned pool, of eval samples, must all be of the pinned version.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._pool_of = run.pool_of
        self._batches = run.batches
        self._counters = run.counters
        self.sound: set[str] = set()  # members whose answers were accepted

    def submit(self, trajectory: Trajectory, packed: Packed, sender: str, now: float) -> str | None:
        """Accept a complete trajectory, or return why it is refused.

        A repeated answer is accepted again, a late one while nobody else has the sample.
        """
        if self.is_accepted(trajectory.sample_id, trajectory.attempt):
            self._counters["duplicate_submits"] += 1
            return None
        pool = self._pool_of(trajectory.sample_id)
        sample = pool.samples.get(trajectory.sample_id)
        if sample is None:
            outcome = pool.over.get(trajectory.sample_id)
            if outcome is None:
                return self._refuse("unknown_sample", "unknown sample, or one that ended long ago")
            return self._refuse("late_answers", f"over: {outcome.end}")
        if sample.attempt != trajectory.attempt or not sample.attempt:
            return self._refuse(
                "wrong_attempt", f"lease {trajectory.attempt} was lost, {sample.attempt} is newest"
            )
        if sample.state is State.GENERATING and sample.holder != sender:
            return self._refuse("wrong_holder", f"{sample.holder} has the lease")
        fault = self._fault(pool, sample, trajectory)
        if fault is None and len(packed) > MORE_BYTES:  # else whatever its arrays take
            fault = size_fault(packed, array_bytes(trajectory), len(trajectory.branches))
        if fault is not None:
            log.warning("%s sent a malformed %s: %s", sender, sample.sample_id, fault)
            if sample.state is State.GENERATING:
                # It may be the sample's fault only if other answers of the sender are sound.
                lost, own = sender in self.sound, self.sound == {sender}
                pool.take_back(sample, lost=lost, reason=f"malformed answer: {fault}", own=own)
            return self._refuse("malformed_trajectory", f"{MALFORMED}{fault}")
        unfit = self._unfit(pool, sample, trajectory)
        if unfit is not None:
            if pool.pinned:
                self._counters["mixed_eval_samples"] += 1
                pool.again(sample)
            else:
                pool.end(sample.group, "stale")
            return self._refuse("stale_answers", unfit)
        if sample.state is State.QUEUED:
            self._counters["late_accepted"] += 1
        pool.accept(sample, trajectory, packed, now)
        self.sound.add(sender)
        self._counters["accepted"] += 1
        if trajectory.branches:
            self._counters["accepted_with_branches"] += 1
        if not pool.pinned:
            self._run.health.answered(trajectory)
        return None

    def hand_back(self, returned: ReturnedSample, sender: str) -> None:
        pool = self._pool_of(returned.sample_id)
        sample = _leased(pool, returned.sample_id, returned.attempt, sender)
        if sample is None:
            self._counters["late_returns"] += 1
            return
        if returned.failed:
            self._count_failure(sample, returned.reason, sender)
            pool.fail(sample, returned.reason or "no reason given", own=True)
            return
        if returned.partial is not None:
            self._keep(pool, sample, returned.partial, sender)
        self._counters["returned"] += 1
        pool.take_back(sample, lost=False)

    def flush(self, partial: Trajectory, sender: str, now: float) -> bool:
        """Store a partial whose sample goes on; False if `sender` has no lease on it."""
        pool = self._pool_of(partial.sample_id)
        sample = _leased(pool, partial.sample_id, partial.attempt, sender)
        if sample is None:
            self._counters["late_flushes"] += 1
            return False
        self._keep(pool, sample, partial, sender)
        self._counters["flushed"] += 1
        pool.leases.renew(sample, now)
        return True

    def _keep(self, pool: SamplePool, sample: Sample, partial: Trajectory, sender: str) -> None:
        fault = self._fault(pool, sample, partial)
        if fault is None and partial.branches:
            fault = "a partial with branches cannot be resumed"
        if fault is None:
            pool.keep(sample, partial, pack(partial))
        else:
            self._counters["malformed_partial"] += 1
            log.warning("%s sent a malformed part of %s: %s", sender, sample.sample_id, fault)

    def _unfit(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str | None:
        oldest, version, due = trajectory.oldest_version, self._batches.version, sample.group.due
        if pool.pinned:
            if oldest == trajectory.newest_version == due:
                return None
            return f"an eval sample of version {due} has tokens of another version"
        if not self._run.policy.is_stale(oldest, version):
            return None
        return f"stale: a token of version {oldest}, the trainer is at {version}"

    def is_accepted(self, sample_id: str, attempt: int) -> bool:
        pool = self._pool_of(sample_id)
        sample = pool.samples.get(sample_id)
        if sample is not None:
            answered = sample.state in (State.SCORING, State.READY, State.TRAINING)
            return answered and sample.attempt == attempt
        outcome = pool.over.get(sample_id)
        return outcome is not None and attempt > 0 and outcome.attempt == attempt

    def _fault(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str | None:
        group = sample.group
        if (trajectory.sample_id, trajectory.attempt) != (sample.sample_id, sample.attempt):
            return "sample_id or attempt is not that of the lease"
        if (trajectory.group_id, trajectory.prompt_id) != (group.group_id, group.prompt.prompt_id):
            return "group_id or prompt_id is not that of the sample"
        newest = self._batches.newest
        return find_fault(trajectory, self._run.facts, newest, trained=not pool.pinned)

    def _refuse(self, counter: str, reason: str) -> str:
        self._counters[counter] += 1
        return reason

    def _count_failure(self, sample: Sample, reason: str, sender: str) -> None:
        self._counters["environment_failures"] += 1
        prompt = sample.group.prompt
        name = prompt.row.get(ENVIRONMENT)
        if name and prompt.prompt_id.startswith(environment_prefix(str(name))):  # one of several
            self._counters[f"environment_failures: {name}"] += 1
        if count_reason(self._counters, reason):
            log.warning("%s failed at %s: %s", sample.sample_id, sender, reason)


def _leased(pool: SamplePool, sample_id: str, attempt: int, sender: str) -> Sample | None:
    sample = pool.leases.find(sample_id, attempt, sender)
    return sample if sample is not None and sample.state is State.GENERATING else None


NOTHING = m.TaskLeases()
STRIKES = 16  # malformed answers in a row, after which a generator gets no more samples


class WorkerEndpoint:
    """The endpoint of generators and scorers.

    A request that finds no work is parked, one per worker; a newer one replaces it (a generator
    serves newer weights, say), and the older is answered with nothing.
    """

    def __init__(self, run: RunState) -> None:
        self.closed = False
        self._run = run
        self._leases = run.leases
        self._counters = run.counters
        self._batches = run.batches
        self._evals = run.evals
        self._scoring = run.scoring
        self._outbox = run.outbox
        self._answers = Answers(run)
        self._generators: dict[str, Parked[m.LeaseTasks]] = {}
        self._scorers: dict[str, Parked[m.LeaseTasks]] = {}
        self._strikes: Counter[str] = Counter()  # faults of a worker since its last sound answer
        self._most: dict[str, int] = {}  # tasks at once, of who could not decode those that it got
        self._granted: dict[str, int] = {}  # by worker, its newest request that got work
        self._served_at = (-1, -1, -1)  # openings and version when generators were last served

    def lease(self, request: Request, body: m.LeaseTasks, now: float) -> None:
        scores, newest = body.kind != SAMPLE, self._batches.newest
        self._check_role(request, "scorer" if scores else "generator")
        name = request.header.sender
        if scores and body.kind not in self._run.buffer.stages:
            stages = ", ".join(self._run.buffer.stages) or "none"
            reason = f"the run has no stage {body.kind!r}; buffer.stages has {stages}"
            raise NackError("unknown_stage", reason, "kind")
        if not scores and not 0 <= body.version <= newest:
            reason = f"{name} serves version {body.version}, but 0 to {newest} exist"
            raise NackError("wrong_version", reason, "version")
        if self._strikes[name] >= STRIKES:
            raise _malformed(name)
        if scores:
            self._scoring.serving[name] = body.kind
        grant = self._grant(request, body, now)
        if grant.tasks or self.closed or body.wait_s <= 0 or body.capacity <= 0:
            self._outbox.reply(request, self._reply(grant))
        else:
            parked = self._scorers if scores else self._generators
            parked[name] = Parked(request, body, now + body.wait_s)

    def submit(self, request: Request, body: m.SubmitResults, now: float) -> None:
        scores_only = body.scores and not body.trajectories
        self._check_role(request, "scorer" if scores_only else "generator")
        refused: dict[str, str] = {}
        sender = request.header.sender
        trajectories, scores = as_arrived(request, body)
        for trajectory, packed in trajectories:
            reason = self._answers.submit(trajectory, packed, sender, now)
            if reason is None:
                self._strikes[sender] = 0
            else:
                refused[trajectory.sample_id] = reason
                self._strikes[sender] += reason.startswith(MALFORMED)
        if self._strikes[sender] >= STRIKES:
            if question := self._generators.pop(sender, None):
                striker = _malformed(sender)
                self._outbox.refuse(question.request, striker.code, str(striker), striker.path)
            self._requeue(sender, self._leases.of(sender), lost=False)
        if scores:
            refused = self._scoring.submit(scores, sender, now)
        accepted = len(trajectories) + len(scores) - len(refused)
        if accepted:
            self._most.pop(sender, None)
            self._strikes[sender] *= not scores
        grant = Grant(sender, request.header.id, 0, now, body.version)
        if body.capacity > 0 and not scores and self._strikes[sender] < STRIKES:
            if 0 <= body.version <= self._batches.newest:
                grant = self._grant(request, body, now)
            else:
                self._counters["wrong_version"] += 1
        self._outbox.reply(request, self._reply(grant, accepted, refused))

    def undecoded(self, request: Request, body: m.Nack) -> None:
        """Requeue samples leased by an answer that their worker cannot decode.

        The worker gets one task at a time from now on, so that the one at fault is lost alone.
        """
        name = request.header.sender
        samples = [s for s in self._leases.of(name) if s.asked == request.header.reply_to]
        if samples:
            log.warning("%s cannot decode %d leases: %s", name, len(samples), body.reason)
        self._counters["undecoded_answers"] += 1
        self._strikes[name] += 1
        self._most[name] = 1
        sound = name in self._answers.sound or any(s.state is State.SCORING for s in samples)
        lost = sound and len({sample.group.group_id for sample in samples}) == 1
        self._requeue(name, samples, lost=lost, why=f"{name} cannot decode it: {body.reason}")

    def hand_back(self, request: Request, body: m.ReturnTasks, _now: float) -> None:
        for returned in body.samples:
            self._answers.hand_back(returned, request.header.sender)
        self._outbox.reply(request, m.Ok())

    def renew(self, request: Request, body: m.RenewLeases, now: float) -> None:
        sender = request.header.sender
        lost: list[str] = []
        for sample_id, attempt in body.leases:
            sample = self._leases.find(sample_id, attempt, sender)
            if sample is not None:
                self._leases.renew(sample, now)
            elif not self._answers.is_accepted(sample_id, attempt):
                lost.append(sample_id)
        lost += [
            partial.sample_id
            for partial in body.partials
            if not self._answers.flush(partial, sender, now)
        ]
        self._outbox.reply(request, m.TaskLeases(lost=lost))

    def serve(self, now: float) -> None:
        """Retry parked requests; generators' only if samples became available since."""
        for question in list(self._scorers.values()):
            if self._scoring.waiting(question.body.kind):
                self._serve(question, 0, now)
        state = (self._run.pool.openings, self._evals.pool.openings, self._batches.version)
        if state == self._served_at:
            return
        self._served_at = state
        waiting = len(self._generators)
        for question in list(self._generators.values()):
            waiting -= 1
            self._serve(question, waiting, now)

    def expire(self, now: float) -> None:
        """Requeue the samples of expired leases; answer overdue requests."""
        for sample in self._leases.expired(now):
            self._counters["expired_leases"] += 1
            log.warning(
                "the lease of %s on %s (attempt %d) has expired",
                sample.holder, sample.sample_id, sample.lease_attempt,
            )  # fmt: skip
            why = ""
            if sample.state is State.SCORING:
                why = f"{sample.holder} did not answer within {self._leases.lease_s:g} s"
            self._run.pool_of(sample.sample_id).take_back(sample, lost=True, reason=why)
        self._answer_parked(now)

    def take_back(self, name: str, *, lost: bool) -> int:
        """Requeue the leases of `name`, which has left; return their number."""
        if question := self._generators.pop(name, None) or self._scorers.pop(name, None):
            self._outbox.refuse_departed(question.request)
        for table in (self._granted, self._strikes, self._most, self._scoring.serving):
            table.pop(name, None)
        self._answers.sound.discard(name)
        self._requeue(name, held := self._leases.of(name), lost=lost)
        return len(held)

    def close(self) -> None:
        self.closed = True
        self._answer_parked(math.inf)

    def _answer_parked(self, until: float) -> None:
        for parked in (self._generators, self._scorers):
            for question in [
                question for question in parked.values() if question.deadline <= until
            ]:
                del parked[question.name]
                self._outbox.reply(question.request, NOTHING)

    def _requeue(self, name: str, samples: list[Sample], *, lost: bool, why: str = "") -> None:
        for sample in samples:
            if sample.holder == name:  # else it ended with another of its group just now
                departure = f"{name} is gone" if sample.state is State.SCORING else ""
                pool = self._run.pool_of(sample.sample_id)
                pool.take_back(sample, lost=lost, reason=why or departure)

    def _check_role(self, request: Request, role: m.Role) -> None:
        peer = self._run.members.peers[request.header.sender]
        if peer.role != role:
            reason = f"this is for a {role}, {peer.name} is a {peer.role}"
            raise NackError("wrong_role", reason, "kind")

    def _grant(self, request: Request, body: m.LeaseTasks | m.SubmitResults, now: float) -> Grant:
        """Lease for a new request, which replaces a parked one."""
        name = request.header.sender
        most = self._most.get(name, BATCH)
        if older := self._generators.pop(name, None) or self._scorers.pop(name, None):
            self._outbox.reply(older.request, NOTHING)
        grant = Grant(name, request.header.id, min(body.capacity, most), now, body.version)
        if not self._grant_again(grant):
            self._take(body, grant, len(self._generators))
        return grant

    def _serve(self, question: Parked[m.LeaseTasks], waiting: int, now: float) -> None:
        request, body = question.request, question.body
        capacity = min(body.capacity, self._most.get(question.name, BATCH))
        grant = Grant(question.name, request.header.id, capacity, now, body.version)
        self._take(body, grant, waiting)
        if grant.tasks:
            del (self._generators if body.kind == SAMPLE else self._scorers)[question.name]
            self._outbox.reply(request, self._reply(grant))

    def _take(self, body: m.LeaseTasks | m.SubmitResults, grant: Grant, waiting: int) -> None:
        if self.closed:
            return
        if isinstance(body, m.LeaseTasks) and body.kind != SAMPLE:
            self._scoring.take(body.kind, grant)
        elif not self._run.paused:
            self._evals.take(grant)
            if not self._evals.pausing:
                self._run.admission.take(grant, waiting)
        if grant.tasks:
            self._granted[grant.holder] = max(grant.request, self._granted.get(grant.holder, 0))

    def _grant_again(self, grant: Grant) -> bool:
        """Grant the same samples again if the buffer died before the answer arrived.

        The server recognises resends, but forgets them when the buffer restarts. Request numbers
        count up, so one above all that got work is new.
        """
        name = grant.holder
        if grant.request > self._granted.get(name, grant.request):
            return False
        held = self._leases.of(name)
        if name not in self._granted:  # the buffer has started again, or it is the first request
            self._granted[name] = max((sample.asked for sample in held), default=0)
        for sample in held:
            if sample.asked == grant.request:
                grant.tasks.append(self._run.pool_of(sample.sample_id).task(sample)[0])
        return bool(grant.tasks)

    def _reply(
        self, grant: Grant, accepted: int = 0, refused: dict[str, str] | None = None
    ) -> m.TaskLeases:
        return m.TaskLeases(
            tasks=grant.tasks,
            more_pinned=bool(grant.tasks) and self._evals.waits_for(grant.version),
            accepted=accepted,
            refused=refused or {},
        )


def _malformed(name: str) -> NackError:
    reason = f"the last {STRIKES} answers of or to {name} were malformed: see the buffer's log"
    return NackError("malformed_answers", reason, "sender")
