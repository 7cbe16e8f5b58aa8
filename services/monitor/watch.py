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
    LifeSeen,
    PushSeen,
    RolloutSeen,
    SampleSeen,
    SpanSeen,
)
from umbra.services.monitor.view import status_dict


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a run at one moment. Spans are by the buffer's clock."""

    status: Status
    pushes: list[PushSeen] = field(default_factory=list[PushSeen])
    samples: list[SampleSeen] = field(default_factory=list[SampleSeen])
    slow: list[SampleSeen] = field(default_factory=list[SampleSeen])
    rollouts: list[RolloutSeen] = field(default_factory=list[RolloutSeen])
    spans: dict[str, list[SpanSeen]] = field(default_factory=dict[str, list[SpanSeen]])
    lives: list[LifeSeen] = field(default_factory=list[LifeSeen])  # since the look before
    lives_lost: int = 0


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
            spans=aligned(self._feed.spans(), status),
            lives=self._feed.take_lives(),
            lives_lost=self._feed.lives_lost,
        )

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.client.close()


def aligned(spans: dict[str, list[SpanSeen]], status: Status) -> dict[str, list[SpanSeen]]:
    """`spans` by the buffer's clock, as far as members have measured how far theirs is off."""
    offsets = clock_offsets(status)
    return {
        name: [
            SpanSeen(span.name, span.start + offsets[name], span.end + offsets[name])
            for span in own
        ]
        if offsets.get(name)
        else own
        for name, own in spans.items()
    }


def clock_offsets(status: Status) -> dict[str, float]:
    """What to add to times of members, by name, to get the buffer's; of those that have measured
    it."""
    return {m.name: m.clock_offset_s for m in status.members if m.clock_error_s >= 0}


def look_dict(look: Look) -> dict[str, Any]:
    """All of it as plain values for JSON."""
    return {
        **status_dict(look.status),
        "pushes": msgspec.to_builtins(look.pushes),
        "samples": msgspec.to_builtins(look.samples),
        "slow_samples": msgspec.to_builtins(look.slow),
        "rollouts": msgspec.to_builtins(look.rollouts),
    }
