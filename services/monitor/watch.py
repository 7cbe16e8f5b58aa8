"""Looks at a run again and again: its status, what has changed, and what members tell of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from umbra.proto.messages import Status
from umbra.proto.net.keys import OPEN, Security
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.feed import (
    TOPICS,
    Feed,
    PushSeen,
    RolloutSeen,
    SampleSeen,
    SpanSeen,
)
from umbra.services.monitor.view import status_dict


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a run at one moment."""

    status: Status
    pushes: list[PushSeen] = field(default_factory=list[PushSeen])
    samples: list[SampleSeen] = field(default_factory=list[SampleSeen])
    slow: list[SampleSeen] = field(default_factory=list[SampleSeen])
    rollouts: list[RolloutSeen] = field(default_factory=list[RolloutSeen])
    spans: dict[str, list[SpanSeen]] = field(default_factory=dict[str, list[SpanSeen]])


class Watch:
    """A look at a time; a context manager. It joins nothing and changes nothing.

    Raises:
        UsageError: `broker` is no address.
    """

    def __init__(self, broker: str, security: Security = OPEN) -> None:
        self.client = StatusClient(broker, security)
        self._feed = Feed()
        self._endpoint = ""

    def look(self, timeout_s: float) -> Look:
        """How things are.

        Raises:
            DeadlineError: nobody answered within `timeout_s` seconds.
        """
        status = self.client.status(timeout_s)
        if status.events and status.events != self._endpoint:
            self._endpoint = status.events
            self.client.subscribe(status.events, TOPICS, self._feed.heard)
        return Look(
            status=status,
            pushes=self._feed.pushes(),
            samples=self._feed.samples(),
            slow=self._feed.slow(),
            rollouts=self._feed.rollouts(),
            spans=self._feed.spans(),
        )

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.client.close()


def look_dict(look: Look) -> dict[str, Any]:
    """All of it as plain values for JSON."""
    return {
        **status_dict(look.status),
        "pushes": msgspec.to_builtins(look.pushes),
        "samples": msgspec.to_builtins(look.samples),
        "slow_samples": msgspec.to_builtins(look.slow),
        "rollouts": msgspec.to_builtins(look.rollouts),
    }
