"""What `umbra up` shows as it runs: a live table on a terminal, now and then a line when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from umbra.deploy.files.run_folder import LineFollower, RunFolder
from umbra.deploy.run.progress import Progress
from umbra.services.monitor.view import NewWarnings, headline, render, starting_text

FRAME_S = 0.25
LINE_S = 5.0


class View(Protocol):
    """Where a run's progress goes."""

    def say(self, text: str) -> None: ...

    def doing(self, what: str, detail: str = "") -> None:
        """Show what goes on until something else does; called often, returns at once."""
        ...

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Show where things are; called often, returns at once."""
        ...

    def close(self) -> None:
        """Leave the terminal as it should be."""
        ...


class QuietView:
    """Nothing."""

    def say(self, text: str) -> None:
        """Drop it."""

    def doing(self, what: str, detail: str = "") -> None:
        """Drop it."""

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to do."""


class PlainView:
    """Lines, one about progress every `every_s` seconds and at the last step."""

    def __init__(
        self,
        *,
        err: bool = False,
        every_s: float = LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._err = err
        self._every_s = every_s
        self._clock = clock
        self._next = clock() + every_s
        self._shown = -1
        self._warnings = NewWarnings()
        self._doing = ("", "")

    def say(self, text: str) -> None:
        click.echo(text, err=self._err)

    def doing(self, what: str, detail: str = "") -> None:
        """Print it when it begins, and now and then a detail that is new."""
        if what != self._doing[0]:
            self._doing = (what, "")
            self._next = self._clock() + self._every_s
            self.say(f"{what} ...")
        elif detail != self._doing[1] and self._clock() >= self._next:
            self._doing = (what, detail)
            self._next = self._clock() + self._every_s
            self.say(f"  {detail}")

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Print what is new in warnings, and the headline if it is time to."""
        status = progress.status
        if status is None:
            return
        for line in self._warnings.lines(status):
            self.say(line)
        ended = status.version >= status.steps
        due = self._clock() >= self._next
        if self._shown < status.steps if ended else due:
            self._next = self._clock() + self._every_s
            self._shown = status.version
            if status.ledger.issued:
                self.say(headline(status, progress.recent_reward))
            else:
                self.say(starting_text(status))

    def close(self) -> None:
        """Nothing to do."""


class TerminalView:
    """A table that is drawn anew four times per second; what is said scrolls by above it."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._next = 0.0
        self._started = time.monotonic()
        self._doing = ("", 0.0)  # what, and since when

    def say(self, text: str) -> None:
        if self._doing[0]:
            self.close()
        self._console.print(Text(text), soft_wrap=True)  # a command can be copied as one line

    def doing(self, what: str, detail: str = "") -> None:
        """Draw a line with the time that it has taken so far; gone once something is said."""
        now = time.monotonic()
        if what != self._doing[0]:
            self.close()
            self._doing = (what, now)
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        elif now < self._next:
            return
        self._next = now + FRAME_S
        assert self._live is not None
        took = f"{now - self._doing[1]:.0f} s"
        line = Text(f"{what}  {detail}  {took}" if detail else f"{what}  {took}", style="dim")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        self._live.update(line, refresh=True)

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Draw the table if it is time to."""
        now = time.monotonic()
        if progress.status is None or now < self._next:
            return
        self._next = now + FRAME_S
        if self._doing[0]:
            self.close()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        table = render(
            progress.status,
            processes=processes,
            rewards=progress.rewards,
            elapsed_s=now - self._started,
        )
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Leave what is drawn, but for what only was going on."""
        self._doing = ("", 0.0)
        if self._live is not None:
            self._live.stop()
            self._live = None


class LogView:
    """Another view, plus every line that the processes log."""

    def __init__(self, view: View, folder: RunFolder) -> None:
        self._view = view
        self._folder = folder
        self._followers: dict[str, LineFollower] = {}

    def say(self, text: str) -> None:
        self._view.say(text)

    def doing(self, what: str, detail: str = "") -> None:
        """As the other view does."""
        self._view.doing(what, detail)

    def update(self, progress: Progress, processes: Mapping[str, str]) -> None:
        """Print what was logged since the last call; the lines name their process."""
        for path in sorted(self._folder.logs.glob("*.log")):
            follower = self._followers.setdefault(path.name, LineFollower(path))
            for line in follower.lines():
                self._view.say(line)
        self._view.update(progress, processes)

    def close(self) -> None:
        self._view.close()


def choose_view(*, quiet: bool, as_json: bool) -> View:
    """The view for how we were called; with `as_json`, standard output is left to the summary."""
    if quiet:
        return QuietView()
    if as_json or not sys.stdout.isatty():
        return PlainView(err=as_json)
    return TerminalView()
