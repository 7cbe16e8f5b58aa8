"""What a person asks of a run from outside: to pause, to go on, to drain, to interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from umbra.proto import messages as m
from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.errors import RejectedError
from umbra.proto.net.server import Request
from umbra.services.buffer.samples.groups import State
from umbra.services.buffer.state import RunState

log = logging.getLogger(__name__)


def interrupt(run: RunState, reason: str, sample_ids: Sequence[str] = ()) -> int:
    """Ask generators to hand back these samples, or all under way; return how many they are.

    A push that is lost costs only the time saved.
    """
    count = 0
    for holder, held in run.leases.held.items():
        leases = [
            (sample.sample_id, sample.attempt)
            for sample in held.values()
            if sample.state is State.GENERATING and sample.sample_id in run.pool.samples
            if not sample_ids or sample.sample_id in sample_ids
        ]
        count += len(leases)
        if leases and holder in run.members.peers:
            for portion in portions(leases, lambda _: 0, LEASES):
                order = m.Interrupt(leases=portion, reason=reason)
                run.outbox.push(run.members.peers[holder].identity, order, "data")
    run.counters["interrupted"] += count
    return count


class OperatorRequests:
    """Answers operators; `end` begins the end of the run, for a reason, at a time."""

    def __init__(self, run: RunState, *, end: Callable[[str, float], None]) -> None:
        self._run = run
        self._members = run.members
        self._outbox = run.outbox
        self._end = end

    def pause(self, request: Request, body: m.PauseRequest, _now: float) -> None:
        log.info("paused by %s: %s", request.header.sender, body.reason)
        self._run.paused = body.reason or "paused on request"
        self._outbox.reply(request, m.Ok())

    def resume(self, request: Request, _body: m.ResumeRequest, _now: float) -> None:
        log.info("resumed by %s", request.header.sender)
        self._run.resume()
        self._outbox.reply(request, m.Ok())

    def interrupt(self, request: Request, body: m.InterruptRequest, _now: float) -> None:
        count = interrupt(self._run, body.reason or "on request", body.samples)
        self._outbox.reply(request, m.Ok(samples=count))

    def evaluate(self, request: Request, _body: m.EvalRequest, _now: float) -> None:
        try:
            samples = self._run.evals.ask()
        except RejectedError as error:
            self._outbox.refuse(request, error.code, str(error))
            return
        version = self._run.batches.version
        self._outbox.reply(request, m.Ok(version=version, samples=samples))

    def drain(self, request: Request, body: m.DrainRequest, now: float) -> None:
        """Drain one member, or end the run if none is named."""
        if not body.member:
            self._outbox.reply(request, m.Ok())
            self._end(body.reason or "drained on request", now)
            return
        peer = self._members.peers.get(body.member)
        if peer is None or peer.is_needed:
            there = ", ".join(sorted(self._members.peers)) or "nobody"
            reason = (
                f"{body.member!r} is not a member: there is {there}"
                if peer is None
                else f"{body.member} is the {peer.role}, without which the run cannot go on: drain "
                "the run as a whole"
            )
            self._outbox.refuse(request, "not_drainable", reason, "member")
            return
        peer.drained = body.reason or "drained on request"
        log.info("%s is asked to leave: %s", peer.name, peer.drained)
        self._outbox.push(peer.identity, m.Command(kind="drain", reason=peer.drained))
        self._outbox.reply(request, m.Ok())
