"""Draw the plots of docs/ as SVG from rows of results; `figures.py` writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 500, 290, 50, 132, 34, 44  # of a panel, and its margins
COLOURS = ("#1a7f37", "#0969da", "#cf222e", "#9a6700", "#8250df", "#57606a", "#bf3989", "#1b7c83")
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#1b1f24}"
    ".title{font-weight:600;font-size:14px}.axis{stroke:#d0d7de}.line{fill:none;stroke-width:2}"
)
SMOOTH = 10  # steps that a point of a reward curve averages

Rows = Sequence[Mapping[str, Any]]
Lines = Mapping[str, Sequence[tuple[float, float]]]


def panel(title: str, lines: Lines, number: int, axis: str) -> str:
    """Draw panel `number` of two columns: a line through the points (x, y) of each name.

    The y axis reaches from 0 to 1, the x axis is called `axis`; names are ordered as lines end.
    """
    x0, y0 = number % 2 * WIDTH, number // 2 * HEIGHT
    xs = [x for line in lines.values() for x, _ in line]
    low, high = min(xs), max(xs)
    left, right = x0 + LEFT, x0 + WIDTH - RIGHT
    top, bottom = y0 + TOP, y0 + HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (x - low) / (high - low), bottom - (bottom - top) * y

    parts = [f'<text class="title" x="{left}" y="{y0 + 20}">{escape(title)}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = place(low, tick)[1]
        parts.append(
            f'<line class="axis" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts += [
        f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{x}</text>'
        for x, at in ((f"{low:,.0f}", left), (axis, (left + right) / 2), (f"{high:,.0f}", right))
    ]
    beside, above = dict[str, float](), 0.0
    for name, line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        beside[name] = above = max(place(*line[-1])[1] + 4, above + 15)
    for n, (name, line) in enumerate(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(
            f'<polyline class="line" stroke="{COLOURS[n]}" points="{path}"/>'
            f'<text x="{right + 8}" y="{beside[name]:.1f}" style="fill:{COLOURS[n]}">'
            f"{escape(name)}</text>"
        )
    return "".join(parts)


def svg(panels: Sequence[str]) -> str:
    """Return an SVG file with `panels` in two columns on a white ground."""
    width, height = min(2, len(panels)) * WIDTH, (len(panels) + 1) // 2 * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(panels)
        + "</svg>\n"
    )


def end_to_end(rows: Rows) -> str:
    """Reward over seconds of each task and mode: the seed with the median time to the accuracy."""
    panels: list[str] = []
    for number, task in enumerate(dict.fromkeys(row["mix"] for row in rows)):
        lines: dict[str, list[tuple[float, float]]] = {}
        for mode in dict.fromkeys(row["mode"] for row in rows if row["mix"] == task):
            some = [row for row in rows if (row["mix"], row["mode"]) == (task, mode)]
            some.sort(key=lambda row: row["to_accuracy_s"] or math.inf)
            curve = some[(len(some) - 1) // 2]["curve"]
            lines[mode] = [
                (curve[n - 1][0], mean(reward for _, reward in curve[n - SMOOTH : n]))
                for n in range(SMOOTH, len(curve) + 1)
            ]
        panels.append(panel(f"reward on {task}, two cores", lines, number, "seconds"))
    return svg(panels)


def staleness(rows: Rows) -> str:
    """Held-out accuracy over staleness, a line for each objective: means of the seeds."""
    panels: list[str] = []
    places = dict.fromkeys((row["task"], row["minibatches"]) for row in rows)
    names = list(dict.fromkeys(row["objective"] for row in rows if row["staleness"]))
    for number, (task, updates) in enumerate(sorted(places, reverse=True)):
        found: dict[str, dict[int, list[float]]] = {name: {} for name in names}
        for row in rows:
            if (row["task"], row["minibatches"]) == (task, updates):
                found[row["objective"]].setdefault(row["staleness"], []).append(row["accuracy"])
        shared = found["naive"].get(0, [])  # on-policy most objectives share their runs
        lines = {
            name: [(k, mean(values)) for k, values in sorted(({0: shared} | some).items())]
            for name, some in found.items()
        }
        panels.append(
            panel(f"{task}, {updates} minibatch(es) per version", lines, number, "staleness")
        )
    return svg(panels)
