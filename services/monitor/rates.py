"""Speeds, from what changed between the statuses of the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from umbra.proto.messages import Status


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second: optimizer steps, samples trained, issued and ended, each member's progress."""

    steps: float = 0.0
    samples: float = 0.0
    issued: float = 0.0
    ended: float = 0.0
    members: dict[str, float] = field(default_factory=dict)


class RateMeter:
    """Differences over a sliding window of `window_s` seconds of the run's own clock."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._seen: deque[Status] = deque()

    def update(self, status: Status) -> Rates:
        """The speeds as of `status`, the newest."""
        if self._seen and (
            status.run_id != self._seen[-1].run_id or status.uptime_s < self._seen[-1].uptime_s
        ):
            self._seen.clear()  # the buffer was restarted
        self._seen.append(status)
        while len(self._seen) > 2 and status.uptime_s - self._seen[1].uptime_s >= self._window_s:
            self._seen.popleft()
        first = self._seen[0]
        seconds = status.uptime_s - first.uptime_s
        if seconds <= 0:
            return Rates()
        before = {(m.name, m.incarnation): m.progress for m in first.members}
        return Rates(
            steps=(status.version - first.version) / seconds,
            samples=(status.ledger.trained - first.ledger.trained) / seconds,
            issued=(status.ledger.issued - first.ledger.issued) / seconds,
            ended=(_ended(status) - _ended(first)) / seconds,
            members={
                m.name: (m.progress - before[m.name, m.incarnation]) / seconds
                for m in status.members
                if (m.name, m.incarnation) in before
            },
        )


def _ended(status: Status) -> int:
    return sum(status.ledger.ended.values())
