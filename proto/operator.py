"""Messages of the control socket by which a person operates a run, without joining it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from umbra.proto.base import Message, Order
from umbra.proto.bounds import BATCH, Id, Name, Text


class DrainRequest(Order, frozen=True, kw_only=True):
    """Have `member` hand back what it holds and leave; if it is empty, end the run in order."""

    member: Name = ""
    reason: Text = ""


class PauseRequest(Order, frozen=True, kw_only=True):
    """Hand out no samples and no batches until `ResumeRequest`."""

    reason: Text = ""


class ResumeRequest(Order, frozen=True, kw_only=True):
    """Hand out samples and batches again."""


class EvalRequest(Order, frozen=True, kw_only=True):
    """Evaluate the policy as it is now, on the run's held-out prompts."""


class EvalBegun(Message, frozen=True, kw_only=True):
    """The evaluation of `version`, or of a later one, begins; `Status.evals` tells how it goes."""

    version: int
    samples: int


class CheckpointRequest(Order, frozen=True, kw_only=True):
    """Have the trainer save its state as it is now, or after the step that it is in."""


class CheckpointMade(Message, frozen=True, kw_only=True):
    """The trainer can start again after `step`."""

    step: int


class InterruptRequest(Order, frozen=True, kw_only=True):
    """Have `samples` (empty: all) come back as partials from where they are being generated."""

    samples: Annotated[list[Id], Meta(max_length=BATCH)] = []
    reason: Text = ""


class Interrupted(Message, frozen=True, kw_only=True):
    """How many samples their generators were asked to hand back."""

    samples: int
