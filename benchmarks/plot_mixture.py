"""Draws docs/mixture.svg from rows of mixture.py: reward against time, of all and by environment.

Means of the last ten batches; a line for each run, a colour for each mode.
"""

from __future__ import annotations

from html import escape
from statistics import mean
from typing import Any

from plots import Rows, svg

WIDTH, HEIGHT = 430, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 34, 34
COLOURS = ("#8c959f", "#57606a", "#0969da", "#9a6700")
SMOOTH = 10


def panel(title: str, name: str, rows: Rows, x0: int, y0: int) -> str:
    """The column `name` of each run's curve."""
    last = max(row["curve"][-1]["s"] for row in rows)
    left, right, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, y0 + HEIGHT - BOTTOM
    parts = [f'<text class="title" x="{left}" y="{y0 + 20}">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - tick * (bottom - y0 - TOP)
        parts.append(
            f'<line class="axis" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    for row in rows:
        points = " ".join(
            f"{left + (right - left) * s / last:.1f},{bottom - value * (bottom - y0 - TOP):.1f}"
            for s, value in smoothed(row["curve"], name)
        )
        colour = COLOURS[modes.index(row["mode"])]
        parts.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
    for n, mode in enumerate(modes):
        y = bottom - 8 - 16 * (len(modes) - 1 - n)
        parts.append(
            f'<circle fill="{COLOURS[n]}" cx="{right - 140}" cy="{y - 4}" r="5"/>'
            f'<text x="{right - 130}" y="{y}">{escape(mode)}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{bottom + 16}">0</text>'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{last:.0f} s</text>'
    )
    return "".join(parts)


def smoothed(curve: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Seconds, and the mean over the last SMOOTH steps that have the column."""
    found = [(step["s"], step[name]) for step in curve if name in step]
    return [
        (found[n - 1][0], mean(value for _, value in found[n - SMOOTH : n]))
        for n in range(SMOOTH, len(found) + 1)
    ]


def picture(rows: Rows) -> str:
    """The whole picture as SVG."""
    known = {"s", "reward", "staleness", "k3"}
    names = [name for name in rows[0]["curve"][0] if name not in known]
    panels = [("all environments", "reward"), *((name, name) for name in names)]
    parts = [
        panel(title, name, rows, n % 2 * WIDTH, n // 2 * HEIGHT)
        for n, (title, name) in enumerate(panels)
    ]
    return svg(2 * WIDTH, (len(panels) + 1) // 2 * HEIGHT, parts)
