"""Draws docs/scale.svg from the rows of scale.py.

Left: samples per second by the number of generators, both axes logarithmic; the grey line is what
the asynchronous run of 8 would be if it grew in proportion. Right: shares of the time, by the same:
slots in use, the trainer at work, the broker's thread at work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from plots import Rows, svg

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 430, 300, 58, 36, 40  # of a panel
COLOURS = {"asynchronous": "#1a7f37", "synchronous, all take turns": "#cf222e", "ideal": "#8c959f"}
SHARES = {"slots in use": "#0969da", "trainer trains": "#9a6700", "broker busy": "#cf222e"}

Points = Sequence[tuple[float, float]]


def panel(
    title: str,
    x0: int,
    lines: Mapping[str, tuple[str, Points]],
    height: Callable[[float], float],
    ticks: Sequence[tuple[float, str]],
) -> str:
    """One panel; `height` of a value is from 0 to 1. Lines are `(colour, points)` by name."""
    xs = sorted({x for _, points in lines.values() for x, _ in points})
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    inner, bottom = WIDTH - LEFT - 16, HEIGHT - BOTTOM

    def place(x: float) -> float:
        return x0 + LEFT + inner * (math.log2(x) - low) / (high - low)

    def level(y: float) -> float:
        return bottom - height(y) * (bottom - TOP)

    parts = [f'<text class="title" x="{x0 + LEFT}" y="20">{escape(title)}</text>']
    for value, label in ticks:
        y = level(value)
        parts.append(
            f'<line class="axis" x1="{x0 + LEFT}" x2="{x0 + WIDTH - 16}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{label}</text>"
        )
    parts += [
        f'<text x="{place(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:,.0f}</text>'
        for x in xs
    ]
    for n, (name, (colour, points)) in enumerate(lines.items()):
        path = " ".join(f"{place(x):.1f},{level(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        parts += [
            f'<circle fill="{colour}" cx="{place(x):.1f}" cy="{level(y):.1f}" r="3"/>'
            for x, y in points
        ]
        y = TOP + 14 + 16 * n
        parts.append(
            f'<circle fill="{colour}" cx="{x0 + LEFT + 12}" cy="{y - 4}" r="5"/>'
            f'<text x="{x0 + LEFT + 22}" y="{y}">{escape(name)}</text>'
        )
    return "".join(parts)


def picture(rows: Rows) -> str:
    """The whole picture as SVG."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        if row["study"] == "generators":
            mode, _, count = row["case"].partition("/")
            found.setdefault(mode, []).append((float(count), row))
    rates = {
        mode: (COLOURS[mode], [(count, row["samples_per_s"]) for count, row in some])
        for mode, some in found.items()
    }
    first, rate = rates["asynchronous"][1][0]
    last = rates["asynchronous"][1][-1][0]
    rates["ideal"] = (COLOURS["ideal"], [(first, rate), (last, rate * last / first)])
    values = [y for _, points in rates.values() for _, y in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    shares = {
        name: (colour, [(count, share(row, name)) for count, row in found["asynchronous"]])
        for name, colour in SHARES.items()
    }
    decades = [(10.0**power, f"{10.0**power:,g}") for power in range(low, high + 1)]
    parts = [
        panel("samples/s by generators", 0, rates, lambda y: (math.log10(y) - low) / (high - low),
              decades),
        panel("shares of the time, asynchronous", WIDTH, shares, lambda y: y,
              [(tick, f"{tick:.0%}") for tick in (0.0, 0.25, 0.5, 0.75, 1.0)]),
    ]  # fmt: skip
    return svg(2 * WIDTH, HEIGHT, parts)


def share(row: dict[str, Any], name: str) -> float:
    """The figure of `row` that a line of this name shows."""
    if name == "slots in use":
        return row["slots"]
    return row["trainer"].get("train", 0.0) if name == "trainer trains" else row["broker_busy"]
