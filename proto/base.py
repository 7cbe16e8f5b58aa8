"""What every message has: a header, and a body that is a `Message`."""

from __future__ import annotations

from typing import Literal

from umbra.proto.bounds import Name, Number, keep_to_bounds
from umbra.proto.records import Record

Role = Literal[
    "buffer", "generator", "scorer", "trainer", "weight_hub", "part", "relay",
    "monitor",
]  # fmt: skip
State = Literal["starting", "joining", "ready", "draining", "stopped", "failed"]


class Header(Record, frozen=True, kw_only=True):
    """First frame of every message."""

    major: int
    minor: int
    type: Name
    id: int  # counts up per sender and incarnation; a resend keeps its id
    sender: Name
    incarnation: Name  # changes at every start of a process: a new one supersedes the old
    reply_to: int | None = None
    sent_at: Number = 0.0  # seconds since the epoch


class Message(Record, frozen=True, kw_only=True):
    """Base of all message bodies; the class-level tag is the header's `type`."""

    def __post_init__(self) -> None:
        keep_to_bounds(self)

    def raw_frames(self) -> int:
        """How many raw frames follow the body."""
        return 0


class Order(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what an operator orders: a misspelt field is refused, as its default acts on all."""
