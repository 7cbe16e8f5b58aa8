"""Output of `umbra up`: now and then a line; `umbra monitor` draws the whole state."""

from __future__ import annotations

import logging
import threading
import time

import click

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Status
from umbra.proto.net.keys import Security
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.view import NewWarnings, headline

LINE_S = 5.0
POLL_S = 0.5
IDLE_S = 5.0  # without a step, after which it is looked less often
ANSWER_S = 2.0

log = logging.getLogger(__name__)


class Progress:
    """The newest status of a run.

    The buffer is asked in a thread, so that a slow one never slows its supervisor.
    """

    def __init__(self) -> None:
        self.status: Status | None = None
        self._closing = threading.Event()
        self._client: StatusClient | None = None
        self._moved_at = time.monotonic()

    def watch(self, broker: str, security: Security) -> None:
        client = self._client = StatusClient(broker, security)

        def ask() -> None:
            while not self._closing.wait(2 * POLL_S if self.idle else POLL_S):
                try:
                    status = client.status(ANSWER_S)
                    if self.status is None or status.version != self.status.version:
                        self._moved_at = time.monotonic()
                    self.status = status
                except UmbraError:
                    pass  # not there yet, busy, or ending: the last status still stands
                except Exception:
                    log.exception("the status cannot be read")  # no reason to end a run

        threading.Thread(target=ask, name="status-watcher", daemon=True).start()

    @property
    def idle(self) -> bool:
        """True if no step was done for a while; before the first status never."""
        return self.status is not None and time.monotonic() - self._moved_at > IDLE_S

    def close(self) -> None:
        self._closing.set()
        if self._client is not None:
            self._client.close()
            self._client = None


class View:
    """Lines about a run: messages, and its progress every `LINE_S` seconds and at the last step.

    They go to stdout, or with `err` to stderr; nowhere if `quiet`.
    """

    def __init__(self, *, quiet: bool = False, err: bool = False) -> None:
        self._quiet, self._err = quiet, err
        self._next = time.monotonic() + LINE_S
        self._shown = -1
        self._warnings = NewWarnings()

    def say(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, err=self._err)

    def update(self, progress: Progress) -> None:
        """Print new warnings, and the headline if it is due; may be called often."""
        status = progress.status
        if status is None:
            return
        for line in self._warnings.lines(status):
            self.say(line)
        over = status.version >= status.steps
        if self._shown < status.steps if over else time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            self._shown = status.version
            self.say(headline(status))
