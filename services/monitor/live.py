"""The terminal view as it runs: a look, the screen, keys, and what they ask for."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import click
from rich.console import RenderableType
from rich.live import Live

from umbra.proto.errors import PeerLostError, UmbraError
from umbra.services.monitor.feed import Look, Watch
from umbra.services.monitor.layout import Scroll
from umbra.services.monitor.screen import screen
from umbra.services.monitor.view import left_text

KEY_S = 0.1  # how late a stop may be noticed


class LiveView:
    """Shows a run on the terminal until it, or the user, ends that.

    Args:
        watch: the run.
        interval_s: seconds between two looks.
        timeout_s: seconds that an answer may take.
    """

    def __init__(self, watch: Watch, interval_s: float, timeout_s: float) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._keys = KeyBindings()
        self._has_keys = sys.stdin.isatty()
        self._scroll = Scroll()

    def run(self, first: Look, stopping: threading.Event) -> None:
        """Show `first` and what follows."""
        look, due, lost = first, time.monotonic() + self._interval_s, False
        with ExitStack() as stack:
            if self._has_keys:
                stack.enter_context(unbuffered(sys.stdin.fileno()))
            live = stack.enter_context(Live(self._draw(look), screen=True, auto_refresh=False))
            while not stopping.is_set():
                key = self._key(stopping)
                if key and self._pressed(key, look) == "quit":
                    break
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval_s
                    try:
                        look = self._watch.look(self._timeout_s)
                    except PeerLostError:
                        lost = True
                        break
                elif not key:
                    continue
                live.update(self._draw(look), refresh=True)
        click.echo(left_text(look.status, lost=lost))

    def _draw(self, look: Look) -> RenderableType:
        if not self._has_keys:
            return screen(look)
        return screen(look, self._keys.footer, self._scroll)

    def _key(self, stopping: threading.Event) -> str:
        """The key that was pressed; waits a little for one."""
        if self._has_keys:
            return next_key(sys.stdin.fileno(), KEY_S)
        stopping.wait(KEY_S)
        return ""

    def _pressed(self, key: str, look: Look) -> Action | None:
        """Do what the key asks for; what that was."""
        if self._keys.asked is None and self._scroll.press(key):
            return None
        try:
            action = self._keys.press(key, paused=bool(look.status.paused))
            if action is not None and action != "quit":
                self._keys.said = self._do(action)
        except UmbraError as error:
            self._keys.said = str(error)
            return None
        return action

    def _do(self, action: Action) -> str:
        client, reason = self._watch.client, "by a key of the monitor"
        match action:
            case "pause":
                client.pause(reason, self._timeout_s)
            case "resume":
                client.resume(self._timeout_s)
            case "drain":
                client.drain("", reason, self._timeout_s)
            case "quit":
                pass
        return f"{action}: done"


Action = Literal["pause", "resume", "drain", "quit"]

HELP = "p pause/resume  d drain  q leave (the run goes on)"
SEQUENCES = {  # what a terminal sends for keys that are no characters
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end",
    "\x1b[1~": "home", "\x1b[4~": "end",
}  # fmt: skip


@contextmanager
def unbuffered(fd: int) -> Iterator[None]:
    """Have the terminal `fd` hand over every key at once, unseen; restored after."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)  # what was pressed already counts
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def next_key(fd: int, timeout_s: float) -> str:
    """The key that was pressed within `timeout_s` seconds, by its name if it is no character;
    empty if none was.
    """
    if not select.select([fd], [], [], timeout_s)[0]:
        return ""
    typed = os.read(fd, 1)  # of several that were pressed at once, the others come next
    while typed[:1] == b"\x1b" and not _is_whole(typed) and select.select([fd], [], [], 0)[0]:
        typed += os.read(fd, 1)
    key = typed.decode(errors="replace")
    return SEQUENCES.get(key, key[:1])


def _is_whole(sequence: bytes) -> bool:
    """Whether an escape sequence has its last character."""
    return len(sequence) > 2 and (sequence[-1:].isalpha() or sequence[-1:] == b"~")


@dataclass
class KeyBindings:
    """What was pressed, and what it means: actions on the run only after `y`.

    `footer` is what to show.
    """

    asked: Action | None = None
    said: str = ""

    @property
    def footer(self) -> str:
        """The question that is open, or the keys."""
        if self.asked is not None:
            return f"{self.said}  y yes   any other key no"
        return f"{self.said}   {HELP}" if self.said else HELP

    def press(self, key: str, *, paused: bool) -> Action | None:
        """A key was pressed; what is to be done now."""
        if self.asked is not None:
            action, self.asked = self.asked, None
            self.said = ""
            return action if key == "y" else None
        self.said = ""
        match key:
            case "q":
                return "quit"
            case "p":
                self._ask("resume" if paused else "pause", "go on?" if paused else "pause the run?")
            case "d":
                self._ask("drain", "end the run in order?")
            case _:
                pass
        return None

    def _ask(self, action: Action, question: str) -> None:
        self.asked, self.said = action, question
