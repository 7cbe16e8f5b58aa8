"""What a person asks of a run from outside: to pause, to go on, to drain, to interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable

from umbra.proto.errors import RejectedError
from umbra.proto.messages import (
    CheckpointRequest,
    Command,
    DrainRequest,
    EvalBegun,
    EvalRequest,
    InterruptRequest,
    Message,
    Nack,
    Ok,
    PauseRequest,
    ResumeRequest,
)
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.membership import Membership
from umbra.services.buffer.works import Works
from umbra.services.runtime.net.server import Request

OPERATIONS: tuple[type[Message], ...] = (
    DrainRequest, PauseRequest, ResumeRequest, EvalRequest, CheckpointRequest,
    InterruptRequest,
)  # fmt: skip

log = logging.getLogger(__name__)


class OperatorRequests:
    """Answers operators.

    Args:
        end: begins the end of the run, for a reason, at a time.
    """

    def __init__(
        self,
        works: Works,
        members: Membership,
        outbox: Effects,
        *,
        end: Callable[[str, float], None],
    ) -> None:
        self._works = works
        self._members = members
        self._outbox = outbox
        self._end = end

    def handle(self, request: Request, now: float) -> None:
        """Do what `request`, one of `OPERATIONS`, asks for."""
        match request.body:
            case PauseRequest(reason=reason):
                log.info("paused by %s: %s", request.header.sender, reason)
                self._works.gate.shut(reason or "paused on request")
                self._outbox.reply(request, Ok())
            case ResumeRequest():
                log.info("resumed by %s", request.header.sender)
                self._works.resume()
                self._outbox.reply(request, Ok())
            case CheckpointRequest():
                self._works.training.checkpoint_wanted(request, now)
            case EvalRequest():
                self._evaluate(request)
            case DrainRequest(member="", reason=reason):
                self._outbox.reply(request, Ok())
                self._end(reason or "drained on request", now)
            case DrainRequest() as body:
                self._drain(request, body)
            case InterruptRequest() as body:
                self._works.interrupts.requested(request, body)
            case body:
                raise TypeError(f"{type(body).__name__} is no operation")

    def _evaluate(self, request: Request) -> None:
        try:
            samples = self._works.evals.ask()
        except RejectedError as error:
            self._outbox.reply(request, Nack(code=error.code, reason=str(error)))
            return
        version = self._works.batches.version
        self._outbox.reply(request, EvalBegun(version=version, samples=samples))

    def _drain(self, request: Request, body: DrainRequest) -> None:
        """Have one member leave."""
        peer = self._members.peers.get(body.member)
        reason = ""
        if peer is None:
            there = ", ".join(sorted(self._members.peers)) or "nobody"
            reason = f"{body.member!r} is not a member: there is {there}"
        elif peer.is_single:
            reason = (
                f"{body.member} is the {peer.role}, without which the run cannot go on: "
                "drain the run as a whole"
            )
        if peer is None or reason:
            self._outbox.reply(request, Nack(code="not_drainable", reason=reason, path="member"))
            return
        peer.drained = body.reason or "drained on request"
        log.info("%s is asked to leave: %s", peer.name, peer.drained)
        self._outbox.push(peer.identity, Command(kind="drain", reason=peer.drained))
        self._outbox.reply(request, Ok())
