"""Draws docs/staleness-accuracy.svg from the rows of staleness.py.

A panel per task and number of minibatches; a line per objective through the means over seeds, with
a bar from the least to the largest.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from statistics import mean

from plots import Rows, svg

WIDTH, HEIGHT, LEFT, TOP = 380, 260, 46, 34  # of a panel, and its margins
COLOURS = ("#cf222e", "#0969da", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#1b7c83", "#57606a")

Panel = dict[str, dict[int, list[float]]]  # objective, staleness, accuracies


def panels(rows: Rows) -> dict[str, Panel]:
    """The rows by panel; an objective without runs at staleness 0 is given what stands for it."""
    result: dict[str, Panel] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        title = f"{row['task']}, {row['minibatches']} minibatch(es) per version"
        result[title][row["objective"]][row["staleness"]].append(row["accuracy"])
    for panel in result.values():
        shared = next((one[0] for one in panel.values() if 0 in one), None)
        for column in panel.values():
            if shared and 0 not in column:
                column[0] = shared
    return result


def draw(title: str, panel: Panel, colours: dict[str, str], x0: int, y0: int) -> str:
    """One panel at (x0, y0)."""
    levels = sorted({level for column in panel.values() for level in column})
    place = {
        level: x0 + LEFT + n * (WIDTH - LEFT - 20) / max(1, len(levels) - 1)
        for n, level in enumerate(levels)
    }
    bottom = y0 + HEIGHT - 40

    def height(accuracy: float) -> float:
        return bottom - accuracy * (bottom - y0 - TOP)

    parts = [f'<text class="title" x="{x0 + LEFT}" y="{y0 + 20}">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = height(tick)
        parts.append(
            f'<line class="axis" x1="{x0 + LEFT}" x2="{x0 + WIDTH - 20}" y1="{y}" y2="{y}"/>'
            f'<text x="{x0 + LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
        )
    for level, x in place.items():
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{level}</text>')
    for objective, column in panel.items():
        colour = colours[objective]
        points = [(place[level], column[level]) for level in sorted(column)]
        path = " ".join(f"{x:.1f},{height(mean(values)):.1f}" for x, values in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        parts += [
            f'<line stroke="{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{height(min(values)):.1f}" '
            f'y2="{height(max(values)):.1f}"/><circle fill="{colour}" cx="{x:.1f}" '
            f'cy="{height(mean(values)):.1f}" r="3"/>'
            for x, values in points
        ]
    return "".join(parts)


def picture(rows: Rows) -> str:
    """The whole picture as SVG."""
    found = dict(sorted(panels(rows).items(), reverse=True))
    names = list(dict.fromkeys(row["objective"] for row in rows))
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    lines = (len(found) + 1) // 2
    width, height = 2 * WIDTH, lines * HEIGHT + 40
    parts = [
        draw(title, panel, colours, (n % 2) * WIDTH, (n // 2) * HEIGHT)
        for n, (title, panel) in enumerate(found.items())
    ]
    step = (width - LEFT) / max(1, len(names))
    for n, name in enumerate(names):
        x = LEFT + n * step
        parts.append(
            f'<circle fill="{colours[name]}" cx="{x}" cy="{height - 16}" r="5"/>'
            f'<text x="{x + 9}" y="{height - 12}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{width / 2}" y="{height - 36}" text-anchor="middle">accuracy after training, by '
        "staleness of the samples (versions)</text>"
    )
    return svg(width, height, parts)
