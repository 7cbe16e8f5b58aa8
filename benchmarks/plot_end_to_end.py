"""Draws docs/end-to-end.svg and end-to-end-real.svg from rows of end_to_end.py and trl_peer.py.

With known times: samples per second of each mode, a panel for each mix of lengths; bars are means
over seeds, their lines reach from the least to the largest, the dashed line is the ideal. Real
runs: reward against time, the median seed of each mode.
"""

from __future__ import annotations

from html import escape
from statistics import mean
from typing import Any

from plots import Rows, svg

WIDTH, HEIGHT = 430, 250  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 150, 60, 34, 40
COLOURS = ("#8c959f", "#57606a", "#9a6700", "#0969da", "#1a7f37", "#cf222e", "#8250df")


def of(rows: Rows, form: str, mix: str) -> dict[str, Rows]:
    """The rows of a form and a mix, by mode."""
    found: dict[str, Rows] = {}
    for row in rows:
        if (row["form"], row["mix"]) == (form, mix):
            found.setdefault(row["mode"], []).append(row)
    return found


def bars(title: str, modes: dict[str, Rows], y0: int, colours: dict[str, str]) -> str:
    """Samples per second, a bar for each mode."""
    values = {mode: [row["samples_per_s"] for row in rows] for mode, rows in modes.items()}
    ideal = mean(row["samples_per_s"] / row["utilisation"] for row in modes.get("async", []))
    most = 1.1 * max(ideal, *(max(some) for some in values.values()))
    wide = WIDTH - LEFT - RIGHT
    parts = [f'<text class="title" x="8" y="{y0 + 20}">{escape(title)}</text>']
    each = (HEIGHT - TOP - BOTTOM) / len(values)
    for n, (mode, some) in enumerate(values.items()):
        y, middle_y = y0 + TOP + n * each, y0 + TOP + (n + 0.5) * each
        end = LEFT + wide * mean(some) / most
        low, high = (LEFT + wide * value / most for value in (min(some), max(some)))
        parts.append(
            f'<text x="{LEFT - 6}" y="{middle_y + 4:.1f}" text-anchor="end">{escape(mode)}</text>'
            f'<rect x="{LEFT}" y="{y + 5:.1f}" width="{end - LEFT:.1f}" height="{each - 10:.1f}" '
            f'fill="{colours[mode]}"/><line stroke="#1b1f24" x1="{low:.1f}" x2="{high:.1f}" '
            f'y1="{middle_y:.1f}" y2="{middle_y:.1f}"/>'
            f'<text x="{end + 8:.1f}" y="{middle_y + 4:.1f}">{mean(some):.1f}</text>'
        )
    x = LEFT + wide * ideal / most
    bottom = y0 + HEIGHT - BOTTOM
    parts.append(
        f'<line class="ideal" x1="{x:.1f}" x2="{x:.1f}" y1="{y0 + TOP}" y2="{bottom}"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">ideal {ideal:.1f}</text>'
    )
    return "".join(parts)


def curves(
    title: str, modes: dict[str, Rows], x0: int, height: int, colours: dict[str, str]
) -> str:
    """Reward, mean of ten batches, against seconds; a line for each mode."""
    chosen = {mode: middle(rows) for mode, rows in modes.items()}
    last = max(row["curve"][-1][0] for row in chosen.values())
    left, bottom, wide = x0 + 50, height - BOTTOM, WIDTH - 70

    def place(at: float, reward: float) -> str:
        return f"{left + wide * at / last:.1f},{bottom - reward * (bottom - TOP):.1f}"

    parts = [f'<text class="title" x="{left}" y="20">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        y = bottom - tick * (bottom - TOP)
        kind = "ideal" if tick == 0.9 else "axis"
        parts.append(
            f'<line class="{kind}" x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for n, (mode, row) in enumerate(chosen.items()):
        rewards = [reward for _, reward in row["curve"]]
        points = [
            place(row["curve"][step - 1][0], mean(rewards[step - 10 : step]))
            for step in range(10, len(rewards) + 1)
        ]
        y = bottom - 14 * (len(chosen) - n)
        parts.append(
            f'<polyline class="line" stroke="{colours[mode]}" points="{" ".join(points)}"/>'
            f'<circle fill="{colours[mode]}" cx="{left + wide - 150}" cy="{y - 4}" r="5"/>'
            f'<text x="{left + wide - 140}" y="{y}">{escape(mode)}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{bottom + 16}">0</text><text x="{left + wide}" y="{bottom + 16}" '
        f'text-anchor="end">{last:.0f} s</text>'
    )
    return "".join(parts)


def middle(rows: Rows) -> dict[str, Any]:
    """The row of the median time to the accuracy."""
    ordered = sorted(rows, key=lambda row: row["to_accuracy_s"] or float("inf"))
    return ordered[(len(ordered) - 1) // 2]


def picture(rows: Rows) -> str:
    """The whole picture as SVG."""
    names = list(dict.fromkeys(row["mode"] for row in rows))
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    if modes := of(rows, "real", "sort"):
        parts = [curves("reward on sort, two cores", modes, 0, 2 * HEIGHT, colours)]
        return svg(WIDTH, 2 * HEIGHT, parts)
    parts = [
        bars(f"samples/s, {mix} lengths", of(rows, "replay", mix), n * HEIGHT, colours)
        for n, mix in enumerate(("long-tailed", "uniform"))
    ]
    return svg(WIDTH, 2 * HEIGHT, parts)
