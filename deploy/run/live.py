"""Output of `umbra up`: a live table on a terminal, now and then a line when piped."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from umbra.deploy.run_folder import RunFolder, StepFollower
from umbra.proto.errors import UmbraError
from umbra.proto.messages import Status
from umbra.proto.net.keys import Security
from umbra.services.monitor.client import Look, StatusClient
from umbra.services.monitor.view import NewWarnings, headline, screen

FRAME_S = 0.25
LINE_S = 5.0
POLL_S = 0.5
IDLE_S = 5.0  # without a step, after which it is looked less often
ANSWER_S = 2.0

log = logging.getLogger(__name__)


class Progress:
    """The newest status, and the mean reward of every step so far.

    The buffer is asked in a thread, so that a slow one never slows its supervisor.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.status: Status | None = None
        self.rewards: list[float] = []
        self._steps = StepFollower(folder.metrics)
        self._closing = threading.Event()
        self._client: StatusClient | None = None
        self._moved_at = time.monotonic()

    def watch(self, broker: str, security: Security) -> None:
        client = self._client = StatusClient(broker, security)

        def ask() -> None:
            while not self._closing.wait(2 * POLL_S if self.idle else POLL_S):
                try:
                    self.status = client.status(ANSWER_S)
                except UmbraError:
                    pass  # not there yet, busy, or ending: the last status still stands
                except Exception:
                    log.exception("the status cannot be read")  # no reason to end a run

        threading.Thread(target=ask, name="status-watcher", daemon=True).start()

    def poll(self) -> None:
        rows = self._steps.new()
        self.rewards += [float(row.get("reward/mean") or 0.0) for row in rows]
        if rows or self.status is None:
            self._moved_at = time.monotonic()

    @property
    def idle(self) -> bool:
        return time.monotonic() - self._moved_at > IDLE_S

    def close(self) -> None:
        self._closing.set()
        if self._client is not None:
            self._client.close()
            self._client = None


class View:
    """The display of a run's progress; this one shows nothing."""

    def say(self, text: str) -> None:
        """Print a line."""

    def doing(self, activity: str, detail: str = "") -> None:
        """Show the present activity; called often, returns at once."""

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Show where things are; called often, returns at once."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainView(View):
    """Lines, one about progress every `LINE_S` seconds and at the last step."""

    def __init__(self, *, err: bool = False) -> None:
        self._err = err
        self._next = time.monotonic() + LINE_S
        self._shown = -1
        self._warnings = NewWarnings()
        self._doing = ("", "")

    def say(self, text: str) -> None:
        click.echo(text, err=self._err)

    def doing(self, activity: str, detail: str = "") -> None:
        """Print it when it begins, and now and then a detail that is new."""
        begins = activity != self._doing[0]
        if begins or (detail != self._doing[1] and time.monotonic() >= self._next):
            self._doing = (activity, "" if begins else detail)
            self._next = time.monotonic() + LINE_S
            self.say(f"{activity} ..." if begins else f"  {detail}")

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Print new warnings, and the headline if it is due."""
        status = progress.status
        if status is None:
            return
        for line in self._warnings.lines(status):
            self.say(line)
        over = status.version >= status.steps
        if self._shown < status.steps if over else time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            self._shown = status.version
            recent = progress.rewards[-10:]
            self.say(headline(status, sum(recent) / len(recent) if recent else None))


class TerminalView(View):
    """A table that is redrawn four times per second; messages scroll by above it."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._next = 0.0
        self._doing = ("", 0.0)  # what, and since when

    def say(self, text: str) -> None:
        if self._doing[0]:
            self.close()
        self._console.print(Text(text), soft_wrap=True)  # a command can be copied as one line

    def doing(self, activity: str, detail: str = "") -> None:
        """Draw a line with the time that it has taken so far; gone once something is said."""
        now = time.monotonic()
        if activity != self._doing[0]:
            self.close()
            self._doing = (activity, now)
        elif now < self._next:
            return
        took = f"{now - self._doing[1]:.0f} s"
        line = Text("  ".join(filter(None, (activity, detail, took))), style="dim")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        self._draw(line, now, transient=True)

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        now = time.monotonic()
        if progress.status is None or now < self._next:
            return
        if self._doing[0]:
            self.close()
        self._draw(screen(Look(progress.status), self._console.width, processes), now)

    def _draw(self, picture: RenderableType, now: float, *, transient: bool = False) -> None:
        self._next = now + FRAME_S
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=transient)
            self._live.start()
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        self._doing = ("", 0.0)
        if self._live is not None:
            self._live.stop()
            self._live = None


def choose_view(*, quiet: bool, as_json: bool) -> View:
    """Return the view for a command's flags; with `as_json`, stdout is left to the summary."""
    if quiet:
        return View()
    if as_json or not sys.stdout.isatty():
        return PlainView(err=as_json)
    return TerminalView()
