"""The broker as a whole, sans-IO: a request or a tick goes in, effects come out.

`handle_all` and `tick` take the time from their caller and return what to send and write. It is in
seconds in which the buffer listened: while this process is stopped, its peers are not silent. A
request that cannot be answered yet is parked until work arrives or its wait is over.
The caller calls `save` and commits the store before it sends anything. A broker that is made with
the store of an earlier one continues its run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from umbra.proto import messages as m
from umbra.proto.access import QUESTIONS, SENDERS, may_send, needs_membership
from umbra.proto.net.server import Refusals, Request, Server
from umbra.proto.net.session import FAILED
from umbra.services.buffer.effects import Effect, NackError, departed
from umbra.services.buffer.endpoints.trainer import TrainerEndpoint
from umbra.services.buffer.endpoints.worker import WorkerEndpoint
from umbra.services.buffer.members import NEEDED, Participant
from umbra.services.buffer.state import DiskQuota, Recovery, RunState
from umbra.services.buffer.status import StallReport, StatusPage

FINISH_S = 10.0  # what members get to leave after FinishRun
STOP_S = 8.0  # the same after a signal: supervisors kill after 10 s
# These make no work for anyone and change nothing that the store keeps.
STILL = frozenset({*QUESTIONS, m.Ok, m.Heartbeat})
# Frequent messages of generators: parked requests are served once for all that came together.
TOGETHER = frozenset({m.LeaseTasks, m.SubmitResults, m.RenewLeases})

log = logging.getLogger(__name__)


class Broker:
    """Handlers of messages and of time over the state of one run; `welcome` is for who joins."""

    def __init__(
        self,
        run: RunState,
        welcome: m.Welcome,
        *,
        events: str = "",
        now: float,
        wire: Server | None = None,
    ) -> None:
        self.run = run
        self.counters, self.members = run.counters, run.members
        self.policy, self.pool, self.batches = run.policy, run.pool, run.batches
        self.failure = ""  # why the run fails, if it does
        self._welcome = welcome
        self._refusals = Refusals() if wire is None else wire.refusals
        self._outbox = run.outbox
        self._deadline = 0.0  # for the others to leave, once the run is ending
        self._finishing: tuple[Request, str] | None = None  # waits for an evaluation, with its why
        self._moved = True  # since the last `save`
        self._workers = WorkerEndpoint(run)
        self._training = TrainerEndpoint(run, missing=StallReport(run).missing)
        self._recovery = Recovery(run, welcome.run_id)
        self.room = DiskQuota(run)
        self._resume(now)
        counters = Counter[str]() if wire is None else wire.counters
        self._page = StatusPage(
            run, self.room, welcome.run_id, events, now, counters, self._refusals
        )

    def save(self) -> None:
        """Put changes into the store; the caller commits them."""
        if self._moved:
            self._moved = False
            self._recovery.save()

    def handle_all(self, requests: Iterable[Request], now: float) -> list[Effect]:
        settled = True
        for request in requests:
            kind = type(request.body)
            try:
                if needs_membership(kind):
                    self._check_member(request, now)
                self._dispatch(request, now)
            except NackError as refusal:
                if refusal.code == "not_allowed":
                    what = f"{kind.__name__} of {request.header.sender!r}: {refusal}"
                    self._refusals.add(what)
                self._outbox.refuse(request, refusal)
            if kind in TOGETHER:
                settled = False
            elif kind not in STILL:
                self._settle(now)
                settled = True
        if not settled:
            self._settle(now)
        return self._outbox.take()

    def _dispatch(self, request: Request, now: float) -> None:
        workers, training = self._workers, self._training
        match request.body:  # the most frequent ones first
            case m.SubmitResults() as body:
                workers.submit(request, body, now)
            case m.LeaseTasks() as body:
                workers.lease(request, body, now)
            case m.RenewLeases() as body:
                workers.renew(request, body, now)
            case m.Heartbeat() as body:
                self._beat(request, body)
            case m.ReturnTasks() as body:
                workers.hand_back(request, body)
            case m.LeaseBatch() as body:
                training.lease(request, body, now)
            case m.CommitBatch() as body:
                training.commit(request, body, now)
            case m.CheckpointSaved() as body:
                training.checkpoint(request, body)
            case m.StatusRequest():
                self._outbox.reply(request, self._page.recent(now))
            case m.Join() as body:
                self._join(request, body, now)
            case m.Leave(reason=reason):
                peer = self.members.peers[request.header.sender]
                log.info("%s has left: %s", peer.name, reason)
                self._remove(peer, reason, lost=reason.startswith(FAILED))
                self._outbox.reply(request, m.Ok())
            case m.FinishRun(reason=reason):
                self._finish(request, reason, now)
            case m.Drain() as body:
                self._drain(request, body, now)
            case m.Ping():
                self._outbox.reply(request, m.Pong(role="buffer", state=self.run.state))
            case m.Ok() | m.Nack():
                self.counters["stray_replies"] += 1
            case body:
                raise NackError("unexpected", f"unexpected message {type(body).__name__}", "type")

    def tick(self, now: float) -> list[Effect]:
        """Handle the passing of time: expired leases, dead members, waits that are over."""
        patience_s: dict[str, float] = {}  # longer for a trainer that holds a batch
        if self.batches.leased and (trainer := self.members.single.get("trainer")):
            buffer = self.run.buffer
            patience_s[trainer.name] = max(buffer.batch_lease_s, buffer.dead_after_s)
        for peer in self.members.silent(now, patience_s):
            log.warning("%s is dead: silent for %.1f s", peer.name, now - peer.heard_at)
            self.counters["dead_members"] += 1
            self._remove(peer, f"dead: silent for {now - peer.heard_at:.0f} s", lost=True)
        self._workers.expire(now)
        self.pool.cut_stragglers(now)
        self._training.expire(now)
        for one in self.run.health.look(self.batches.version):
            log.warning("%s: %s", one.name, one.text)
            self._outbox.measure("warning", name=one.name, text=one.text, figures=one.figures)
        self.room.check(now)
        self._page.throughput.see(now)
        self._settle(now)
        return self._outbox.take()

    def drain(self, reason: str, now: float) -> list[Effect]:
        self._begin_end(reason, now, STOP_S)
        self._settle(now)
        return self._outbox.take()

    def is_over(self, now: float) -> bool:
        if self.run.state != "draining":
            return False
        return now >= self._deadline or not self.members.working

    def close(self, now: float) -> list[Effect]:
        """End samples still in flight and write the final ledger."""
        for peer in self.members.working:
            log.warning("%s has not left in time", peer.name)
        self.run.cancel()
        self.run.state = "stopped"
        own = self.pool.ledger.snapshot()
        self._outbox.measure("ledger", issued=own.issued, trained=own.trained, ended=own.ended)
        self._settle(now)
        return self._outbox.take()

    def status(self, now: float) -> m.Status:
        return self._page.status(now)

    def _resume(self, now: float) -> None:
        if not self._recovery.restore(now):
            return
        self.counters["restarts"] += 1
        run, ledger = self.run, self.pool.ledger
        text = "the run goes on at version %d: %d samples in flight, %d members"
        in_flight = ledger.live - ledger.trained
        log.info(text, self.batches.version, in_flight, len(self.members.peers))
        if run.finished and (run.finished_of or self.batches.version) < run.config.run.steps:
            run.finished = ""  # run.steps was raised after the run had reached its end
        if run.finished:
            self._begin_end(run.finished, now, FINISH_S)

    def _drain(self, request: Request, body: m.Drain, now: float) -> None:
        reason = body.reason or "drained on request"
        if body.member:
            self._drain_member(body.member, reason)
        else:
            self._begin_end(reason, now, STOP_S)
        log.info("drain by %s: %s %s", request.header.sender, body.member, body.reason)
        self._outbox.reply(request, m.Ok())

    def _drain_member(self, member: str, reason: str) -> None:
        peer = self.members.peers.get(member)
        if peer is None:
            names = ", ".join(sorted(self.members.peers)) or "none"
            why = f"{member!r} is not a member: members are {names}"
            raise NackError("not_drainable", why, "member")
        if peer.role in NEEDED:
            why = f"{member} is the {peer.role}, without which the run cannot go on: "
            raise NackError("not_drainable", why + "drain the run as a whole", "member")
        peer.drained = reason
        self._outbox.push(peer.identity, m.Command(kind="drain", reason=reason))

    def _join(self, request: Request, body: m.Join, now: float) -> None:
        if self.run.state != "ready":
            raise NackError("run_ending", "the run is ending", "role")
        before = self.members.peers.get(body.name)
        peer = self.members.join(request, body, now)
        if before is not None and before.incarnation != peer.incarnation:
            self.counters["superseded"] += 1
            self._take_back(before, lost=True)
        self.run.facts.learn(body.vocabulary, body.routers)
        log.info("%s has joined (%s, pid %d on %s)", peer.name, peer.role, peer.pid, peer.host)
        self._outbox.reply(request, self._welcome)

    def _check_member(self, request: Request, now: float) -> None:
        peer, kind = self.members.hear(request, now), type(request.body)
        # With keys the server has checked this: a member has the role of its key.
        if request.role is None and kind in SENDERS and not may_send(peer.role, kind):
            needed = " or a ".join(SENDERS[kind])
            reason = f"{kind.__name__} is for a {needed}, {peer.name} is a {peer.role}"
            raise NackError("wrong_role", reason, "type")

    def _beat(self, request: Request, body: m.Heartbeat) -> None:
        peer = self.members.peers[request.header.sender]
        peer.beat(body)
        weights, incarnation = self.members.hub
        ack = m.HeartbeatAck(
            version=self.batches.version,
            heartbeat_s=self.members.pace_s,
            weights=weights,
            weights_incarnation=incarnation,
        )
        self._outbox.reply(request, ack)
        reason = "the run is ending" if self.run.state == "draining" else peer.drained
        if reason and body.state != "draining":
            self._outbox.push(peer.identity, m.Command(kind="drain", reason=reason))

    def _remove(self, peer: Participant, why: str, *, lost: bool) -> None:
        self.members.remove(peer, why)
        self._take_back(peer, lost=lost)

    def _take_back(self, peer: Participant, *, lost: bool) -> None:
        if count := self._workers.take_back(peer.name, lost=lost):
            log.info("took %d samples back from %s", count, peer.name)
            self.counters["taken_back"] += count
        if peer.role == "trainer":
            self._training.forget()
            if self._finishing is not None:
                self._outbox.refuse(self._finishing[0], departed(peer.name))
            self._finishing = None

    def _finish(self, request: Request, reason: str, now: float) -> None:
        run = self.run
        run.evals.advance(now)
        if run.evals.open:
            self._finishing = request, reason
            return
        run.finished = f"run finished: {reason}"
        run.finished_of = run.config.run.steps
        run.cancel()
        ledger = self.pool.ledger.snapshot()
        self._outbox.reply(request, m.RunFinished(ledger=ledger, evals=run.evals.newest))
        self._begin_end(run.finished, now, FINISH_S)

    def _begin_end(self, reason: str, now: float, patience_s: float) -> None:
        if self.run.state != "ready":
            return
        log.info("the run ends: %s", reason)
        self.run.state, self.run.ending = "draining", reason
        self._deadline = now + patience_s
        self._workers.close()
        self._training.close()
        for peer in self.members.peers.values():
            self._outbox.push(peer.identity, m.Command(kind="drain", reason=reason))

    def _settle(self, now: float) -> None:
        """Serve those who wait, and check the ledgers, after an event."""
        self._moved = True
        if not self._training.closed:
            self.run.evals.advance(now)
        self._training.serve(now)
        self._workers.serve(now)
        self.run.check()
        if self.run.state == "ready" and (why := self.run.health.verdict):
            self.failure = why
            self._begin_end(why, now, STOP_S)
        if self._finishing is not None and not self.run.evals.open:
            (request, reason), self._finishing = self._finishing, None
            self._finish(request, reason, now)
