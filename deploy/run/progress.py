"""What is known of a run while it goes on: its status, polled from the buffer, and its rewards."""

from __future__ import annotations

import logging
import threading

from umbra.deploy.files.run_folder import LineFollower, RunFolder
from umbra.proto.errors import UmbraError
from umbra.proto.messages import Status
from umbra.proto.net.keys import Security
from umbra.services.monitor.client import StatusClient
from umbra.services.process.metrics import parse_row

POLL_S = 0.5
ANSWER_S = 2.0

log = logging.getLogger(__name__)


class StatusWatcher:
    """Asks for the status in a thread, so that a slow buffer never slows its supervisor."""

    def __init__(self, broker: str, security: Security) -> None:
        self.latest: Status | None = None
        self._client = StatusClient(broker, security)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="status-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._client.close()
        self._thread.join(ANSWER_S)

    def _main(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self.latest = self._client.status(ANSWER_S)
            except UmbraError:
                pass  # not there yet, busy, or ending: the last status still stands
            except Exception:
                log.exception("the status cannot be read")  # no reason to end a run


class Progress:
    """The newest status, and the mean reward of every step so far."""

    def __init__(self, folder: RunFolder) -> None:
        self.status: Status | None = None
        self.rewards: list[float] = []
        self._metrics = LineFollower(folder.metrics)
        self._watcher: StatusWatcher | None = None

    def watch(self, broker: str, security: Security) -> None:
        """Begin to poll the buffer at `broker`."""
        self._watcher = StatusWatcher(broker, security)

    def poll(self) -> None:
        """Take in what is new; never blocks."""
        newest = None if self._watcher is None else self._watcher.latest
        if newest is not None and newest is not self.status:
            self.status = newest
        for line in self._metrics.lines():
            if '"kind":"step"' in line:  # most lines are spans: don't parse those
                if (row := parse_row(line)) is not None:
                    self.rewards.append(float(row.get("reward/mean") or 0.0))

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last ten steps."""
        recent = self.rewards[-10:]
        return sum(recent) / len(recent) if recent else None

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
