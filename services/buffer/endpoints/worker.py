"""The side of generators and scorers: questions for tasks, results, renewals and returns."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

from umbra.proto import messages as m
from umbra.proto.bounds import BATCH
from umbra.proto.messages import ReturnedSample
from umbra.proto.net.server import Request
from umbra.proto.records import SAMPLE, Trajectory, array_bytes
from umbra.services.buffer.effects import NackError, departed
from umbra.services.buffer.endpoints import scoring
from umbra.services.buffer.members import Participant
from umbra.services.buffer.samples.groups import ANSWERED, Grant, Sample, State
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
NOTHING = m.TaskLeases()
STRIKES = 16  # malformed answers in a row, after which a generator gets no more samples

log = logging.getLogger(__name__)


class Parked(NamedTuple):
    """A question that waits for tasks until `deadline`."""

    request: Request
    body: m.LeaseTasks
    deadline: float


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
        self._outbox = run.outbox
        # By kind of task and by name.
        self._parked: dict[str, dict[str, Parked]] = {
            kind: {} for kind in (SAMPLE, *run.buffer.stages)
        }
        self._generators = self._parked[SAMPLE]
        self._served_at = (-1, -1, -1)  # openings and version when generators were last served

    def lease(self, request: Request, body: m.LeaseTasks, now: float) -> None:
        scores, newest = body.kind != SAMPLE, self._run.batches.newest
        peer = self._sender(request, "scorer" if scores else "generator")
        if body.kind not in self._parked:
            stages = ", ".join(self._run.buffer.stages) or "none"
            reason = f"the run has no stage {body.kind!r}; buffer.stages has {stages}"
            raise NackError("unknown_stage", reason, "kind")
        if not scores and not 0 <= body.version <= newest:
            reason = f"{peer.name} serves version {body.version}, but 0 to {newest} exist"
            raise NackError("wrong_version", reason, "version")
        if peer.strikes >= STRIKES:
            raise _malformed(peer.name)
        if scores:
            peer.stage = body.kind
        grant = self._grant_new(request, body, now)
        if grant.tasks or self.closed or body.wait_s <= 0 or body.capacity <= 0:
            self._outbox.reply(request, self._reply(grant))
        else:
            self._parked[body.kind][peer.name] = Parked(request, body, now + body.wait_s)

    def submit(self, request: Request, body: m.SubmitResults, now: float) -> None:
        scores_only = body.scores and not body.trajectories
        peer = self._sender(request, "scorer" if scores_only else "generator")
        refused: dict[str, str] = {}
        trajectories, scores = as_arrived(request, body)
        for trajectory, packed in trajectories:
            reason = self._accept(trajectory, packed, peer, now)
            if reason is None:
                peer.strikes = 0
            else:
                refused[trajectory.sample_id] = reason
                peer.strikes += reason.startswith(MALFORMED)
        if peer.strikes >= STRIKES:
            if question := self._generators.pop(peer.name, None):
                self._outbox.refuse(question.request, _malformed(peer.name))
            self._requeue(peer.name, self._leases.of(peer.name), lost=False)
        if scores:
            refused = scoring.submit(self._run, scores, peer.name, now)
        accepted = len(trajectories) + len(scores) - len(refused)
        grant = Grant(peer.name, request.header.id, 0, now, body.version)
        if body.capacity > 0 and not scores and peer.strikes < STRIKES:
            if 0 <= body.version <= self._run.batches.newest:
                grant = self._grant_new(request, body, now)
            else:
                self._counters["wrong_version"] += 1
        self._outbox.reply(request, self._reply(grant, accepted, refused))

    def hand_back(self, request: Request, body: m.ReturnTasks) -> None:
        for returned in body.samples:
            self._hand_back(returned, request.header.sender)
        self._outbox.reply(request, m.Ok())

    def renew(self, request: Request, body: m.RenewLeases, now: float) -> None:
        sender = request.header.sender
        lost: list[str] = []
        for sample_id, attempt in body.leases:
            sample = self._leases.find(sample_id, attempt, sender)
            if sample is not None:
                self._leases.renew(sample, now)
            elif not self._is_accepted(sample_id, attempt):
                lost.append(sample_id)
        for partial in body.partials:  # of samples that go on
            pool, sample = self._generating(partial.sample_id, partial.attempt, sender)
            if sample is None:
                self._counters["late_flushes"] += 1
                lost.append(partial.sample_id)
                continue
            self._keep(pool, sample, partial, sender)
            self._counters["flushed"] += 1
            self._leases.renew(sample, now)
        self._outbox.reply(request, m.TaskLeases(lost=lost))

    def serve(self, now: float) -> None:
        """Retry parked requests; generators' only if samples became available since."""
        run = self._run
        for stage in run.buffer.stages:
            if self._parked[stage] and run.waiting(stage):
                for question in list(self._parked[stage].values()):
                    self._serve(question, 0, now)
        state = (run.pool.openings, run.evals.pool.openings, run.batches.version)
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
            name, attempt = sample.sample_id, sample.lease_attempt
            log.warning("the lease of %s on %s (attempt %d) expired", sample.holder, name, attempt)
            why = ""
            if sample.state is State.SCORING:
                why = f"{sample.holder} did not answer within {self._leases.lease_s:g} s"
            self._run.pool_of(name).take_back(sample, lost=True, reason=why)
        self._answer_parked(now)

    def take_back(self, name: str, *, lost: bool) -> int:
        """Requeue the leases of `name`, which has left; return their number."""
        if question := self._unpark(name):
            self._outbox.refuse(question.request, departed(name))
        held = self._leases.of(name)
        self._requeue(name, held, lost=lost)
        return len(held)

    def close(self) -> None:
        self.closed = True
        self._answer_parked(math.inf)

    def _sender(self, request: Request, role: m.Role) -> Participant:
        peer = self._run.members.peers[request.header.sender]
        if peer.role != role:
            reason = f"this is for a {role}, {peer.name} is a {peer.role}"
            raise NackError("wrong_role", reason, "kind")
        return peer

    def _unpark(self, name: str) -> Parked | None:
        for parked in self._parked.values():
            if question := parked.pop(name, None):
                return question
        return None

    def _answer_parked(self, until: float) -> None:
        for parked in self._parked.values():
            for name, question in list(parked.items()):
                if question.deadline <= until:
                    del parked[name]
                    self._outbox.reply(question.request, NOTHING)

    def _requeue(self, name: str, samples: list[Sample], *, lost: bool) -> None:
        for sample in samples:
            if sample.holder == name:  # else it ended with another of its group just now
                gone = f"{name} is gone" if sample.state is State.SCORING else ""
                pool = self._run.pool_of(sample.sample_id)
                pool.take_back(sample, lost=lost, reason=gone)

    def _grant_new(
        self, request: Request, body: m.LeaseTasks | m.SubmitResults, now: float
    ) -> Grant:
        """Lease for a new request, which replaces a parked one."""
        if older := self._unpark(request.header.sender):
            self._outbox.reply(older.request, NOTHING)
        return self._grant(request, body, len(self._generators), now)

    def _serve(self, question: Parked, waiting: int, now: float) -> None:
        grant = self._grant(question.request, question.body, waiting, now)
        if grant.tasks:
            del self._parked[question.body.kind][grant.holder]
            self._outbox.reply(question.request, self._reply(grant))

    def _grant(
        self, request: Request, body: m.LeaseTasks | m.SubmitResults, waiting: int, now: float
    ) -> Grant:
        """Lease available tasks, while `waiting` other generators want work.

        A request whose answer was lost with an earlier life of the buffer gets the same samples
        again: the server recognises resends, but forgets them at a restart. Request numbers count
        up, so one above all that got work is new.
        """
        run, number = self._run, request.header.id
        peer = run.members.peers[request.header.sender]
        grant = Grant(peer.name, number, min(body.capacity, BATCH), now, body.version)
        if peer.granted is None or number <= peer.granted:
            held = self._leases.of(peer.name)
            if peer.granted is None:  # the buffer has started again, or it is the first request
                peer.granted = max((sample.asked for sample in held), default=0)
            for sample in held:
                if sample.asked == number:
                    run.pool_of(sample.sample_id).hand_out(sample, grant)
        if grant.tasks or self.closed:
            return grant
        if isinstance(body, m.LeaseTasks) and body.kind != SAMPLE:
            scoring.take(run, body.kind, grant)
        else:
            run.evals.take(grant)
            if not run.evals.pausing:
                run.batches.take(grant, waiting)
        if grant.tasks:
            peer.granted = max(number, peer.granted)
        return grant

    def _reply(
        self, grant: Grant, accepted: int = 0, refused: dict[str, str] | None = None
    ) -> m.TaskLeases:
        return m.TaskLeases(
            tasks=grant.tasks,
            more_pinned=bool(grant.tasks) and self._run.evals.waits_for(grant.version),
            accepted=accepted,
            refused=refused or {},
        )

    def _accept(
        self, trajectory: Trajectory, packed: Packed, peer: Participant, now: float
    ) -> str | None:
        """Accept a complete trajectory, or return why it is refused.

        While its sample is in flight a repeated answer is accepted again, and a late one if nobody
        else has it. Tokens of a pinned pool, of eval samples, must all be of the pinned version.
        """
        name, attempt = trajectory.sample_id, trajectory.attempt
        if self._is_accepted(name, attempt):
            self._counters["duplicate_submits"] += 1
            return None
        run, pool = self._run, self._run.pool_of(name)
        sample = pool.samples.get(name)
        if sample is None:
            return self._refuse("late_answers", "the sample was trained or has ended")
        if sample.attempt != attempt or not attempt:
            return self._refuse(
                "wrong_attempt", f"lease {attempt} was lost, {sample.attempt} is newest"
            )
        if sample.state is State.GENERATING and sample.holder != peer.name:
            return self._refuse("wrong_holder", f"{sample.holder} has the lease")
        fault = self._fault(pool, sample, trajectory)
        if fault is None and len(packed) > MORE_BYTES:  # else whatever its arrays take
            fault = size_fault(packed, array_bytes(trajectory), len(trajectory.branches))
        if fault is not None:
            log.warning("%s sent a malformed %s: %s", peer.name, name, fault)
            if sample.state is State.GENERATING:
                # It may be the sample's fault only if other answers of the sender are sound.
                own = peer.sound and not any(
                    other.sound for other in run.members.peers.values() if other is not peer
                )
                reason = f"malformed answer: {fault}"
                pool.take_back(sample, lost=peer.sound, reason=reason, own=own)
            return self._refuse("malformed_trajectory", f"{MALFORMED}{fault}")
        if unfit := self._unfit(pool, sample, trajectory):
            if pool.pinned:
                self._counters["mixed_eval_samples"] += 1
                pool.again(sample)
            else:
                pool.end(sample.group, "stale")
            return self._refuse("stale_answers", unfit)
        if sample.state is State.QUEUED:
            self._counters["late_accepted"] += 1
        pool.accept(sample, trajectory, packed, now)
        peer.sound = True
        self._counters["accepted"] += 1
        if trajectory.branches:
            self._counters["accepted_with_branches"] += 1
        if not pool.pinned:
            run.health.answered(trajectory)
        return None

    def _refuse(self, counter: str, reason: str) -> str:
        self._counters[counter] += 1
        return reason

    def _is_accepted(self, sample_id: str, attempt: int) -> bool:
        sample = self._run.pool_of(sample_id).samples.get(sample_id)
        return sample is not None and sample.state in ANSWERED and sample.attempt == attempt

    def _fault(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str | None:
        group = sample.group
        if (trajectory.sample_id, trajectory.attempt) != (sample.sample_id, sample.attempt):
            return "sample_id or attempt is not that of the lease"
        if (trajectory.group_id, trajectory.prompt_id) != (group.group_id, group.prompt.prompt_id):
            return "group_id or prompt_id is not that of the sample"
        run = self._run
        return find_fault(trajectory, run.facts, run.batches.newest, trained=not pool.pinned)

    def _unfit(self, pool: SamplePool, sample: Sample, trajectory: Trajectory) -> str:
        """Return why a sound answer may not be used, or ""."""
        oldest, version = trajectory.oldest_version, self._run.batches.version
        due = sample.group.due
        if pool.pinned and not oldest == trajectory.newest_version == due:
            return f"an eval sample of version {due} has tokens of another version"
        if not pool.pinned and self._run.policy.is_stale(oldest, version):
            return f"stale: a token of version {oldest}, the trainer is at {version}"
        return ""

    def _generating(
        self, sample_id: str, attempt: int, sender: str
    ) -> tuple[SamplePool, Sample | None]:
        """Return the pool of a sample, and the sample if `sender` is to generate it."""
        sample = self._leases.find(sample_id, attempt, sender)
        held = sample if sample is not None and sample.state is State.GENERATING else None
        return self._run.pool_of(sample_id), held

    def _hand_back(self, returned: ReturnedSample, sender: str) -> None:
        pool, sample = self._generating(returned.sample_id, returned.attempt, sender)
        if sample is None:
            self._counters["late_returns"] += 1
            return
        if not returned.failed:
            if returned.partial is not None:
                self._keep(pool, sample, returned.partial, sender)
            self._counters["returned"] += 1
            pool.take_back(sample, lost=False)
            return
        self._counters["environment_failures"] += 1
        prompt, reason = sample.group.prompt, returned.reason
        name = prompt.row.get(ENVIRONMENT)
        if name and prompt.prompt_id.startswith(environment_prefix(str(name))):  # one of several
            self._counters[f"environment_failures: {name}"] += 1
        if count_reason(self._counters, reason):
            log.warning("%s failed at %s: %s", sample.sample_id, sender, reason)
        pool.fail(sample, reason or "no reason given", own=True)

    def _keep(self, pool: SamplePool, sample: Sample, partial: Trajectory, sender: str) -> None:
        """Store the partial of `sample`, unless it is malformed."""
        fault = self._fault(pool, sample, partial)
        if fault is None and partial.branches:
            fault = "a partial with branches cannot be resumed"
        if fault is None:
            pool.keep(sample, partial, pack(partial))
        else:
            self._counters["malformed_partial"] += 1
            log.warning("%s sent a malformed part of %s: %s", sender, sample.sample_id, fault)


def _malformed(name: str) -> NackError:
    reason = f"the last {STRIKES} answers of {name} were malformed: see the buffer's log"
    return NackError("malformed_answers", reason, "sender")
