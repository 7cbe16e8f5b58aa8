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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.proto.access import SENDERS, may_send
from umbra.proto.messages import (
    CheckpointRequest,
    CheckpointSaved,
    Command,
    CommitBatch,
    DrainRequest,
    EvalRequest,
    FinishRun,
    FlushPartials,
    Heartbeat,
    HeartbeatAck,
    InterruptRequest,
    Join,
    LeaseBatch,
    LeaseSamples,
    LeaseScoring,
    Leave,
    Message,
    Nack,
    Ok,
    PauseRequest,
    PeekBatch,
    Ping,
    Pong,
    RejectSamples,
    RenewLeases,
    ResumeRequest,
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
from umbra.services.buffer.endpoints.operator import OperatorRequests
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
STOP_S = 8.0  # the same after a signal: supervisors kill after 10 s

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """How a kind of message is answered.

    Attributes:
        answer: gets the request, its body and the time.
        members: only members may ask, with a role that may (`proto/access.py`).
        moves: whether it may change what the store keeps, or make work for others.
    """

    answer: Callable[[Request, Any, float], None]
    members: bool = True
    moves: bool = True


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
        self._routes = self._make_routes()
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
        route = self._routes.get(type(request.body), Route(self._unexpected))
        if not route.members or self._may_ask(request, now):
            route.answer(request, request.body, now)
        return self._settle(now) if route.moves else self._outbox.take()

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

    def _make_routes(self) -> dict[type[Message], Route]:
        """Who answers what."""
        rollouts, scorers, training = self.works.rollouts, self.works.scorers, self.works.training
        operator = self._operations
        return {
            Ok: Route(self._stray, members=False, moves=False),
            Nack: Route(self._stray, members=False, moves=False),
            Ping: Route(self._ping, members=False, moves=False),
            StatusRequest: Route(self._status, members=False, moves=False),
            PauseRequest: Route(operator.pause, members=False),
            ResumeRequest: Route(operator.resume, members=False),
            CheckpointRequest: Route(operator.checkpoint, members=False),
            EvalRequest: Route(operator.evaluate, members=False),
            DrainRequest: Route(operator.drain, members=False),
            InterruptRequest: Route(operator.interrupt, members=False),
            Join: Route(self._join, members=False),
            Heartbeat: Route(self._beat, moves=False),
            Leave: Route(self._leave),
            LeaseSamples: Route(rollouts.lease),
            SubmitTrajectories: Route(rollouts.submit),
            ReturnSamples: Route(rollouts.hand_back),
            FlushPartials: Route(rollouts.flush),
            RenewLeases: Route(self._renew),
            LeaseScoring: Route(scorers.lease),
            SubmitScores: Route(scorers.submit),
            LeaseBatch: Route(training.lease),
            PeekBatch: Route(training.peek),
            RejectSamples: Route(training.reject),
            CommitBatch: Route(training.commit),
            CheckpointSaved: Route(training.checkpoint),
            FinishRun: Route(self._finish),
        }

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

    def _may_ask(self, request: Request, now: float) -> bool:
        """Whether a member asks, and its role may; else it has been refused."""
        peer, kind = self.members.hear(request, now), type(request.body)
        if isinstance(peer, Nack):
            self._refuse(request, peer)
            return False
        if kind in SENDERS and not may_send(peer.role, kind):
            needed = " or a ".join(SENDERS[kind])
            reason = f"{kind.__name__} is for a {needed}, {peer.name} is a {peer.role}"
            self._refuse(request, Nack(code="wrong_role", reason=reason, path="type"))
            return False
        return True

    def _unexpected(self, request: Request, body: Message, _now: float) -> None:
        reason = f"{type(body).__name__} is nothing that the buffer is asked"
        self._refuse(request, Nack(code="unexpected", reason=reason, path="type"))

    def _stray(self, _request: Request, _body: Ok | Nack, _now: float) -> None:
        self.counters["stray_replies"] += 1

    def _ping(self, request: Request, _body: Ping, _now: float) -> None:
        self._outbox.reply(request, Pong(role="buffer", state=self.state))

    def _status(self, request: Request, _body: StatusRequest, now: float) -> None:
        self._outbox.reply(request, self._overview.recent(now, finished=self.finished))

    def _renew(self, request: Request, body: RenewLeases, now: float) -> None:
        if self._sender(request).role == "scorer":
            self.works.scorers.renew(request, body, now)
        else:
            self.works.rollouts.renew(request, body, now)

    def _leave(self, request: Request, body: Leave, _now: float) -> None:
        peer = self._sender(request)
        log.info("%s has left: %s", peer.name, body.reason)
        self._remove(peer, body.reason, lost=False)
        self._outbox.reply(request, Ok())

    def _sender(self, request: Request) -> Participant:
        return self.members.peers[request.header.sender]

    def _beat(self, request: Request, body: Heartbeat, now: float) -> None:
        peer = self._sender(request)
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
