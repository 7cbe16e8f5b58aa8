"""What every message has: a header, and a body that is a `Message`."""

from __future__ import annotations

from typing import Literal

from umbra.proto.records import Record

Role = Literal["buffer", "generator", "scorer", "trainer", "weight_hub", "relay", "monitor"]
State = Literal["starting", "joining", "ready", "draining", "stopped", "failed"]


class Header(Record, frozen=True, kw_only=True):
    """First frame of every message."""

    major: int
    minor: int
    type: str
    id: int  # counts up per sender and incarnation; a resend keeps its id
    sender: str
    incarnation: str  # changes at every start of a process: a new one supersedes the old
    reply_to: int | None = None
    sent_at: float = 0.0  # seconds since the epoch


class Message(Record, frozen=True, kw_only=True):
    """Base of all message bodies; the class-level tag is the header's `type`."""

    def raw_frames(self) -> int:
        """How many raw frames follow the body."""
        return 0
