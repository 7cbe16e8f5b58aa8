"""What the terminal view is made of where windows are small: parts that know how wide they are,
and a window on what is longer than the screen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

NARROW = 120  # columns, below which parts stand below each other


@dataclass(frozen=True, slots=True)
class ByWidth:
    """One thing where there is room for it, another one where there is not."""

    wide: RenderableType
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.narrow if options.max_width < NARROW else self.wide


def beside(left: RenderableType, right: RenderableType) -> ByWidth:
    """Two parts beside each other, below each other where it is narrow."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 3))
    grid.add_row(left, right)
    return ByWidth(grid, Group(left, right))


class Scroll:
    """Where in a long text the window is; keys move it."""

    def __init__(self) -> None:
        self.top = 0
        self._most = 0  # the last `top` with a full window, as of the last drawing
        self._page = 1

    def press(self, key: str) -> bool:
        """Whether `key` moves the window."""
        steps = {
            "down": 1, "j": 1, "up": -1, "k": -1, "pagedown": self._page, " ": self._page,
            "pageup": -self._page, "b": -self._page, "end": self._most, "home": -self._most,
        }  # fmt: skip
        if key not in steps:
            return False
        self.top = max(0, min(self._most, self.top + steps[key]))
        return True

    def fit(self, lines: int, room: int) -> int:
        """The first line to show of so many, if there is room for `room`."""
        self._most, self._page = max(0, lines - room), max(1, room - 1)
        self.top = min(self.top, self._most)
        return self.top


@dataclass(frozen=True, slots=True)
class ScrolledWindow:
    """`head` stays, of `body` the lines that `scroll` says; the last line tells of the rest."""

    head: RenderableType
    body: RenderableType
    scroll: Scroll

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(height=None)
        head = console.render_lines(self.head, free, pad=False)
        body = console.render_lines(self.body, free, pad=False)
        room = max(1, options.size.height - len(head))
        if len(body) > room:
            room = max(1, room - 1)
        top = self.scroll.fit(len(body), room)
        yield from _segments([*head, *body[top : top + room]])
        if len(body) > room:
            told = f"lines {top + 1}-{top + room} of {len(body)}: arrows, PgUp and PgDn scroll"
            yield Text(told, style="dim", no_wrap=True, overflow="ellipsis")


def _segments(lines: Iterable[list[Segment]]) -> Iterable[Segment]:
    for line in lines:
        yield from line
        yield Segment.line()
