"""The broker as a whole, sans-IO: a request or a tick goes in, effects come out.

`handle` and `tick` take the time from their caller (seconds, monotonic) and return what is to be
sent and written. A request that cannot be answered yet is parked; it is answered when work arrives
or when its wait is over. `save` puts into the store what has changed: the caller does that, and
commits the store, before it sends anything. A broker that is made with the store of an earlier one
goes on where that one ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbra.proto.access import SENDERS, may_send
from umbra.proto.messages import (
    CheckpointSaved,
    Command,
    CommitBatch,
    FinishRun,
    FlushPartials,
    Heartbeat,
    HeartbeatAck,
    Join,
    LeaseBatch,
    LeaseSamples,
    LeaseScoring,
    Leave,
    Nack,
    Ok,
    PeekBatch,
    Ping,
    Pong,
    RejectSamples,
    RenewLeases,
    ReturnSamples,
    RunFinished,
    State,
    Status,
    StatusRequest,
    SubmitScores,
    SubmitTrajectories,
    Welcome,
)
from umbra.services.buffer.data.prompts import Prompt, Prompts
from umbra.services.buffer.effects import Effect, Effects
from umbra.services.buffer.endpoints.operator import OPERATIONS, OperatorRequests
from umbra.services.buffer.membership import Membership, Participant
from umbra.services.buffer.stalls import StallReport
from umbra.services.buffer.status import StatusPage
from umbra.services.buffer.store.api import Store
from umbra.services.buffer.store.quota import DiskQuota
from umbra.services.buffer.store.recovery import Recovery
from umbra.services.buffer.works import Works
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.net.server import Request
from umbra.services.runtime.net.zap import Refusals

FINISH_S = 10.0  # what members get to leave after FinishRun
STILL = (Heartbeat, Ping, StatusRequest, Ok, Nack)  # move nothing that is kept
STOP_S = 8.0  # the same after a signal: supervisors kill after 10 s

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """What joiners are told."""

    data: str
    events_in: str
    events_out: str


class Broker:
    """Prompts, leases, trajectories, staleness, ledger and membership of one run.

    Args:
        config: of the run.
        run_id: told to everyone.
        prompts: endless.
        eval_prompts: held-out ones, if there are any.
        store: keeps all of it; a run that it holds goes on.
        endpoints: of the data and telemetry sockets.
        now: the time, seconds.
        wire_counters: counted by the sockets' side; shown with the broker's own.
        refusals: of those who lack the right key.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        prompts: Prompts,
        eval_prompts: Sequence[Prompt] = (),
        store: Store,
        endpoints: Endpoints,
        now: float,
        wire_counters: Mapping[str, int] | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        buffer = config.buffer
        self.counters: Counter[str] = Counter()
        self.members = Membership(buffer)
        self._refusals = refusals or Refusals()
        self._outbox = Effects()
        works = Works(
            config,
            store,
            prompts,
            eval_prompts,
            self.members,
            missing=self._missing,
            counters=self.counters,
            outbox=self._outbox,
        )
        self.works = works
        self.policy, self.pool, self.batches = works.policy, works.pool, works.batches
        report = self._report = StallReport(works, self.members, buffer)
        self._operations = OperatorRequests(works, self.members, self._outbox, end=self._stop)
        self._config = config
        self._run_id = run_id
        self._endpoints = endpoints
        self._deadline = 0.0  # for the others to leave, once the run is ending
        self._finish_request: Request | None = None  # waits for an evaluation
        self._moved = True  # anything, since the last `save`
        self.failure = ""  # why the run ends badly, if so
        self._recovery = Recovery(
            works.journal,
            run={
                "run_id": run_id,
                "buffer.group_size": buffer.group_size,
                "buffer.batch_groups": buffer.batch_groups,
                "buffer.stages": list(buffer.stages),
            },
            pool=self.pool,
            batches=self.batches,
            members=self.members,
            training=works.training,
            run_ahead=works.run_ahead,
            health=works.health,
            evals=works.evals,
            gate=works.gate,
            prompts=prompts,
            counters=self.counters,
        )
        self.room = DiskQuota(store, self.pool, self.batches, buffer.store_max_bytes)
        self._overview = StatusPage(
            works,
            self.members,
            report,
            self.room,
            run_id=run_id,
            events=endpoints.events_out,
            steps=config.run.steps,
            started_at=now,
            wire_counters={} if wire_counters is None else wire_counters,
            refusals=self._refusals,
        )
        self._resume(now)

    def save(self) -> None:
        """Put what has changed into the store; the caller commits it."""
        if self._moved:
            self._moved = False
            self._recovery.save()

    @property
    def state(self) -> State:
        """Where this process is in its life."""
        return self._overview.state

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end, and not just this process."""
        return bool(self._recovery.finished)

    def handle(self, request: Request, now: float) -> list[Effect]:
        """The effects of `request`."""
        match request.body:
            case Ok() | Nack():
                self.counters["stray_replies"] += 1
            case Ping():
                self._outbox.reply(request, Pong(role="buffer", state=self.state))
            case StatusRequest():
                status = self._overview.recent(now, finished=self.finished)
                self._outbox.reply(request, status)
            case body if isinstance(body, OPERATIONS):
                self._operations.handle(request, now)
            case Join() as body:
                self._join(request, body, now)
            case _:
                peer = self.members.hear(request, now)
                if isinstance(peer, Nack):
                    self._refuse(request, peer)
                else:
                    self._handle_member(request, peer, now)
        return self._outbox.take() if isinstance(request.body, STILL) else self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """The effects of time: expired leases, dead members, waits that are over."""
        for peer in self.members.silent(now, self._patience()):
            log.warning("%s is dead: silent for %.1f s", peer.name, now - peer.heard_at)
            self.counters["dead_members"] += 1
            self._remove(peer, f"dead: silent for {now - peer.heard_at:.0f} s", lost=True)
        self.works.tick(now)
        self.room.check(now)
        self._overview.tick(now)
        return self._settle(now)

    def drain(self, reason: str, now: float) -> list[Effect]:
        """Ask everyone to hand back what they have and to leave."""
        self._stop(reason, now)
        return self._settle(now)

    def is_over(self, now: float) -> bool:
        """Whether the run is ending and all but monitors have left, or had the time for it."""
        if self.state != "draining":
            return False
        return now >= self._deadline or not self.members.working

    def close(self, now: float) -> list[Effect]:
        """End what is still in flight; the final ledger."""
        for peer in self.members.working:
            log.warning("%s has not left in time", peer.name)
        self.works.cancel()
        self._overview.state = "stopped"
        ledger = self.pool.ledger.snapshot()
        self._outbox.measure(
            "ledger", issued=ledger.issued, trained=ledger.trained, ended=ledger.ended
        )
        return self._settle(now)

    def status(self, now: float) -> Status:
        """The whole state of the run."""
        return self._overview.status(now, finished=self.finished)

    def _resume(self, now: float) -> None:
        """Go on with the run in the store, if there is one."""
        if not self._recovery.restore(now):
            return
        self.counters["restarts"] += 1
        ledger = self.pool.ledger
        log.info(
            "the run goes on at version %d: %d samples in flight, %d members",
            self.batches.version, ledger.live - ledger.trained, len(self.members.peers),
        )  # fmt: skip
        if self._recovery.finished:
            self._begin_end(self._recovery.finished, now, FINISH_S)

    # -- members -----------------------------------------------------------------------------------

    def _join(self, request: Request, body: Join, now: float) -> None:
        if self.state != "ready":
            self._refuse(request, Nack(code="run_ending", reason="the run is ending", path="role"))
            return
        before = self.members.peers.get(body.name)
        peer = self.members.join(request, body, now)
        if isinstance(peer, Nack):
            self._refuse(request, peer)
            return
        if before is not None and before.incarnation != peer.incarnation:
            self.counters["superseded"] += 1
            self.works.take_back(before, lost=True)
        log.info("%s has joined (%s, pid %d on %s)", peer.name, peer.role, peer.pid, peer.host)
        weights, incarnation = self.members.hub
        welcome = Welcome(
            run_id=self._run_id,
            heartbeat_s=self._config.buffer.heartbeat_s,
            data=self._endpoints.data,
            events_in=self._endpoints.events_in,
            events_out=self._endpoints.events_out,
            weights=weights,
            weights_incarnation=incarnation,
        )
        self._outbox.reply(request, welcome)

    def _handle_member(self, request: Request, peer: Participant, now: float) -> None:
        kind = type(request.body)
        if kind in SENDERS and not may_send(peer.role, kind):
            needed = " or a ".join(SENDERS[kind])
            reason = f"{kind.__name__} is for a {needed}, {peer.name} is a {peer.role}"
            self._refuse(request, Nack(code="wrong_role", reason=reason, path="type"))
            return
        match request.body:
            case Heartbeat() as body:
                self._beat(request, peer, body, now)
            case Leave() as body:
                log.info("%s has left: %s", peer.name, body.reason)
                self._remove(peer, body.reason, lost=False)
                self._outbox.reply(request, Ok())
            case LeaseSamples() as body:
                self.works.rollouts.lease(request, body, now)
            case SubmitTrajectories() as body:
                self.works.rollouts.submit(request, body, now)
            case ReturnSamples() as body:
                self.works.rollouts.hand_back(request, body)
            case FlushPartials() as body:
                self.works.rollouts.flush(request, body, now)
            case RenewLeases() as body if peer.role == "scorer":
                self.works.scorers.renew(request, body, now)
            case RenewLeases() as body:
                self.works.rollouts.renew(request, body, now)
            case LeaseScoring() as body:
                self.works.scorers.lease(request, body, now)
            case SubmitScores() as body:
                self.works.scorers.submit(request, body, now)
            case LeaseBatch() as body:
                self.works.training.lease(request, body, now)
            case PeekBatch() as body:
                self.works.training.peek(request, body, now)
            case RejectSamples() as body:
                self.works.training.reject(request, body)
            case CommitBatch() as body:
                self.works.training.commit(request, body)
            case CheckpointSaved() as body:
                self.works.training.checkpoint(request, body)
            case FinishRun() as body:
                self._finish(request, body, now)
            case body:
                reason = f"{type(body).__name__} is nothing that the buffer is asked"
                self._refuse(request, Nack(code="unexpected", reason=reason, path="type"))

    def _beat(self, request: Request, peer: Participant, body: Heartbeat, now: float) -> None:
        self.members.beat(peer, body, now)
        weights, incarnation = self.members.hub
        ack = HeartbeatAck(
            version=self.batches.version,
            heartbeat_s=self.members.pace_s,
            weights=weights,
            weights_incarnation=incarnation,
            received_at=request.received_at,
        )
        self._outbox.reply(request, ack)
        reason = "the run is ending" if self.state == "draining" else peer.drained
        if reason and body.state != "draining":
            self._outbox.push(peer.identity, Command(kind="drain", reason=reason))

    def _remove(self, peer: Participant, why: str, *, lost: bool) -> None:
        self.members.remove(peer, why)
        self.works.take_back(peer, lost=lost)

    def _patience(self) -> dict[str, float]:
        """A trainer that holds a batch may be silent for longer before it counts as dead."""
        trainer = self.members.find("trainer")
        if trainer is None or self.batches.leased is None:
            return {}
        buffer = self._config.buffer
        return {trainer.name: max(buffer.batch_lease_s, buffer.dead_after_s)}

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, request: Request, body: FinishRun, now: float) -> None:
        """End the run; an evaluation under way is completed before."""
        self.works.evals.advance(now)
        if self.works.evals.is_open and self.state == "ready":
            self._finish_request = request
            return
        self._recovery.finished = f"run finished: {body.reason}"
        self.works.cancel()
        ledger = self.pool.ledger.snapshot()
        self._outbox.reply(request, RunFinished(ledger=ledger, evals=self.works.evals.newest))
        self._begin_end(self._recovery.finished, now, FINISH_S)

    def _stop(self, reason: str, now: float) -> None:
        self._begin_end(reason, now, STOP_S)

    def _begin_end(self, reason: str, now: float, patience_s: float) -> None:
        if self.state != "ready":
            return
        log.info("the run ends: %s", reason)
        self._overview.state, self._overview.ending = "draining", reason
        self._deadline = now + patience_s
        self.works.close(now)
        for peer in self.members.peers.values():
            self._outbox.push(peer.identity, Command(kind="drain", reason=reason))

    # -- common ------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        """Serve what is parked with whatever the event has opened up; the event's effects."""
        self._moved = True
        self.works.settle(now)
        if self.state == "ready" and (why := self.works.health.verdict):
            self.failure = why
            self._stop(why, now)
        request = self._finish_request
        if request is not None and not self.works.evals.is_open:
            self._finish_request = None
            assert isinstance(request.body, FinishRun)
            self._finish(request, request.body, now)
        return self._outbox.take()

    def _missing(self, now: float) -> str:
        return self._report.missing(now)

    def _refuse(self, request: Request, nack: Nack) -> None:
        self.counters[nack.code] += 1
        if nack.code == "not_allowed":
            kind = type(request.body).__name__
            self._refusals.add(f"{kind} of {request.header.sender!r}: {nack.reason}")
        log.debug("refused %s: %s", type(request.body).__name__, nack.reason)
        self._outbox.reply(request, nack)
