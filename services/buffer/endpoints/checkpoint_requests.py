"""Operators that wait for a checkpoint, which only the trainer can make."""

from __future__ import annotations

from dataclasses import dataclass

from umbra.proto.messages import CheckpointMade, CheckpointSaved, Nack
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.policy.batches import Batches

WAIT_S = 3600.0  # writing a large model takes its time


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    version: int  # when it was made: a checkpoint of this or a later one grants it
    deadline: float


class CheckpointRequests:
    """The trainer hears of them with the answer to its next question for a batch, again and again
    until it says that it has saved."""

    def __init__(self, batches: Batches, outbox: Effects) -> None:
        self._newest = -1  # step of the newest checkpoint that we know of
        self._batches = batches
        self._outbox = outbox
        self._waiting: list[_Waiting] = []

    @property
    def open(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def add(self, request: Request, now: float) -> None:
        """Somebody wants a checkpoint of the version of now, or of a later one."""
        self._waiting.append(_Waiting(request, self._batches.version, now + WAIT_S))
        self._grant()

    def told(self, body: CheckpointSaved) -> None:
        """The trainer says what it has saved, or why it could not."""
        self._newest = max(self._newest, body.newest)
        self._grant()
        if body.error:
            self._refuse(self._waiting, f"the trainer could not save its state: {body.error}")

    def forget_after(self, step: int) -> None:
        """The trainer has started again after `step`: what it saved later does not count."""
        self._newest = min(self._newest, step)

    def _grant(self) -> None:
        for waiting in self._waiting:
            if waiting.version <= self._newest:
                self._outbox.reply(waiting.request, CheckpointMade(step=self._newest))
        self._waiting = [waiting for waiting in self._waiting if waiting.version > self._newest]

    def expire(self, now: float) -> None:
        """Answer those who have waited too long."""
        late = [waiting for waiting in self._waiting if waiting.deadline <= now]
        self._refuse(late, f"the trainer has made no checkpoint within {WAIT_S:g} s: see its log")

    def close(self) -> None:
        """The run is ending: nobody has to wait any more."""
        self._refuse(self._waiting, "the run is ending")

    def _refuse(self, refused: list[_Waiting], reason: str) -> None:
        for waiting in refused:
            self._outbox.reply(waiting.request, Nack(code="no_checkpoint", reason=reason))
        self._waiting = [waiting for waiting in self._waiting if waiting not in refused]
