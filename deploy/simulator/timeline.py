"""Simulated time: what happens when, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], object]


class Timeline:
    """A queue of actions; the clock jumps from one to the next. Those of one moment go in order."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.events = 0  # actions that were done
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Do `action` at `time`, or now if that is over."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, action))

    def after(self, delay: float, action: Action) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def every(self, period: float, action: Action) -> None:
        """Do `action` again and again, first in `period` seconds."""

        def again() -> None:
            action()
            self.after(period, again)

        self.after(period, again)

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until `until` is true after an action, or nothing is left to do."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            self.events += 1
            action()
            if until():
                return


class Shares:
    """How long something was in which state, from `restart` to the last `stop`."""

    def __init__(self, timeline: Timeline) -> None:
        self.state = "starting"
        self.counted: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._timeline = timeline
        self._since = timeline.now

    def to(self, state: str) -> None:
        """It is in `state` from now on."""
        now = self._timeline.now
        if now > self._since:
            self._seconds[self.state] = self._seconds.get(self.state, 0.0) + now - self._since
        self.state, self._since = state, now

    def restart(self) -> None:
        """Count from now on."""
        self._seconds.clear()
        self._since = self._timeline.now

    def stop(self) -> None:
        """Count until now; said again, until then."""
        self.to(self.state)
        self.counted = dict(self._seconds)
