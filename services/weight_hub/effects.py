"""What the push protocol speaks of, and what it asks its service to do."""

from __future__ import annotations

from dataclasses import dataclass

from umbra.proto.messages import Abort, Commit, Message, Prepare

Ticket = object  # a request that is answered later; opaque here


@dataclass(frozen=True, slots=True)
class HubPeer:
    """Sender of a message: its name in the run and its incarnation."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Publication:
    """A version in its slot; `number` counts publications."""

    number: int
    version: int
    slot: int
    checksums: list[int]
    snapshot_s: float
    at: float


@dataclass(frozen=True, slots=True)
class HubReply:
    """Effect: reply to a request."""

    ticket: Ticket
    message: Message


@dataclass(frozen=True, slots=True)
class Admit:
    """Effect: tell a subscriber the layout; its first PREPARE comes after this."""

    ticket: Ticket
    receiver: str


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: push a message to a receiver."""

    receiver: str
    message: Prepare | Commit | Abort


@dataclass(frozen=True, slots=True)
class Pushed:
    """Effect: a receiver serves a version; seconds of each phase.

    `total_s` runs from Publish (or from the subscription, if that was later) to COMMITTED.
    """

    receiver: str
    version: int
    epoch: int
    snapshot_s: float
    wire_s: float
    stage_s: float
    commit_s: float
    total_s: float
    wire_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: a push failed; with `dropped`, the receiver is unsubscribed."""

    receiver: str
    version: int | None
    phase: str
    reason: str
    dropped: bool


Effect = HubReply | Admit | Send | Pushed | Failed
