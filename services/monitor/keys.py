"""Keys of the terminal view: read one at a time, and made into actions once they are confirmed."""

from __future__ import annotations

import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Action = Literal["pause", "resume", "drain", "quit"]

HELP = "p pause/resume  d drain  ? help  q leave (the run goes on)"
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
