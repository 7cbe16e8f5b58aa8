"""The terminal view as it runs: a look, the screen, keys, and what they ask for."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack

import click
from rich.console import RenderableType
from rich.live import Live

from umbra.proto.errors import PeerLostError, UmbraError
from umbra.services.monitor.keys import Action, KeyBindings, next_key, unbuffered
from umbra.services.monitor.layout import Scroll
from umbra.services.monitor.screen import help_screen, screen
from umbra.services.monitor.view import left_text
from umbra.services.monitor.watch import Look, Watch

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
        self._helping = False

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
        if self._helping:
            return help_screen(look, "any key: back")
        return screen(look, self._keys.footer, self._scroll)

    def _key(self, stopping: threading.Event) -> str:
        """The key that was pressed; waits a little for one."""
        if self._has_keys:
            return next_key(sys.stdin.fileno(), KEY_S)
        stopping.wait(KEY_S)
        return ""

    def _pressed(self, key: str, look: Look) -> Action | None:
        """Do what the key asks for; what that was."""
        if self._helping or (key == "?" and self._keys.asked is None):
            self._helping = not self._helping
            return None
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
