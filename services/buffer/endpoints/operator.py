"""What a person asks of a run from outside: to pause, to go on, to drain, to interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable

from umbra.proto import messages as m
from umbra.proto.errors import RejectedError
from umbra.proto.net.server import Request
from umbra.services.buffer.samples.leases import Cancellations
from umbra.services.buffer.state import RunState

log = logging.getLogger(__name__)


class OperatorRequests:
    """Answers operators.

    Args:
        wants_checkpoint: has the trainer make one, for a request, at a time.
        interrupts: stops samples under way.
        end: begins the end of the run, for a reason, at a time.
    """

    def __init__(
        self,
        run: RunState,
        *,
        wants_checkpoint: Callable[[Request, float], None],
        interrupts: Cancellations,
        end: Callable[[str, float], None],
    ) -> None:
        self._run = run
        self._members = run.members
        self._outbox = run.outbox
        self._wants_checkpoint = wants_checkpoint
        self._interrupts = interrupts
        self._end = end

    def pause(self, request: Request, body: m.PauseRequest, _now: float) -> None:
        log.info("paused by %s: %s", request.header.sender, body.reason)
        self._run.paused = body.reason or "paused on request"
        self._outbox.reply(request, m.Ok())

    def resume(self, request: Request, _body: m.ResumeRequest, _now: float) -> None:
        log.info("resumed by %s", request.header.sender)
        self._run.resume()
        self._outbox.reply(request, m.Ok())

    def checkpoint(self, request: Request, _body: m.CheckpointRequest, now: float) -> None:
        self._wants_checkpoint(request, now)

    def interrupt(self, request: Request, body: m.InterruptRequest, _now: float) -> None:
        self._interrupts.requested(request, body)

    def evaluate(self, request: Request, _body: m.EvalRequest, _now: float) -> None:
        try:
            samples = self._run.evals.ask()
        except RejectedError as error:
            self._outbox.reply(request, m.Nack(code=error.code, reason=str(error)))
            return
        version = self._run.batches.version
        self._outbox.reply(request, m.EvalBegun(version=version, samples=samples))

    def drain(self, request: Request, body: m.DrainRequest, now: float) -> None:
        """Drain one member, or end the run if none is named."""
        if not body.member:
            self._outbox.reply(request, m.Ok())
            self._end(body.reason or "drained on request", now)
            return
        peer = self._members.peers.get(body.member)
        reason = ""
        if peer is None:
            there = ", ".join(sorted(self._members.peers)) or "nobody"
            reason = f"{body.member!r} is not a member: there is {there}"
        elif peer.is_needed:
            reason = (
                f"{body.member} is the {peer.role}, without which the run cannot go on: "
                "drain the run as a whole"
            )
        if peer is None or reason:
            self._outbox.reply(request, m.Nack(code="not_drainable", reason=reason, path="member"))
            return
        peer.drained = body.reason or "drained on request"
        log.info("%s is asked to leave: %s", peer.name, peer.drained)
        self._outbox.push(peer.identity, m.Command(kind="drain", reason=peer.drained))
        self._outbox.reply(request, m.Ok())
