"""Charts as SVG text, coloured by the page's style sheet; no library, nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from umbra.services.reporting.tables import compact

WIDTH, HEIGHT = 420, 160
RIGHT, TOP, BOTTOM = 8, 8, 20
TICK = 6.2  # of a character of a tick, at most
POINTS = 400  # of a line at most; more are thinned out by means

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


def line_chart(lines: Mapping[str, Points], *, title: str) -> str:
    """Return lines over a common x; empty if there is nothing to draw."""
    lines = {name: _thin(points) for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_of, y_of, axes = _frame(min(xs), max(xs), min(ys), max(ys))
    parts = [axes]
    for index, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line c{index % 8}" points="{path}"/>')
        if len(lines) > 1:
            place = f'x="{WIDTH - RIGHT - 4}" y="{TOP + 12 + 13 * index}"'
            parts.append(f'<text class="key t{index % 8}" {place}>{escape(name)}</text>')
    return _figure(title, "".join(parts))


def bar_chart(counts: Sequence[int], *, title: str) -> str:
    """Return a histogram over 0, 1, 2, ...; empty if there is nothing to draw."""
    if not any(counts):
        return ""
    x_of, y_of, axes = _frame(-0.5, len(counts) - 0.5, 0.0, 1.1 * max(counts), whole=True)
    parts = [axes]
    total = sum(counts)
    for value, count in enumerate(counts):
        left, right = x_of(value - 0.4), x_of(value + 0.4)
        top = y_of(count)
        size = f'width="{right - left:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        parts.append(f'<rect class="f0" x="{left:.1f}" y="{top:.1f}" {size}/>')
        place = f'x="{(left + right) / 2:.1f}" y="{max(top - 3, 10):.1f}"'
        parts.append(f'<text class="mid" {place}>{count / total:.0%}</text>')
    return _figure(title, "".join(parts))


def _figure(title: str, inner: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{inner}</svg></figure>'
    )


def _frame(
    x_min: float, x_max: float, y_min: float, y_max: float, *, whole: bool = False
) -> tuple[Scale, Scale, str]:
    if y_max - y_min < 1e-12:
        y_min, y_max = y_min - 0.5, y_max + 0.5
    x_span, y_span = max(x_max - x_min, 1e-12), y_max - y_min
    ticks = _ticks(y_min, y_max, 4)
    left = 8 + TICK * max((len(compact(tick)) for tick in ticks), default=0)

    def x_of(x: float) -> float:
        return left + (WIDTH - left - RIGHT) * (x - x_min) / x_span

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (y - y_min) / y_span

    parts = []
    for tick in ticks:
        y = y_of(tick)
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="end" x="{left - 4:.1f}" y="{y + 4:.1f}">{compact(tick)}</text>')
    for tick in _ticks(x_min, x_max, 6):
        if whole and tick != int(tick):
            continue
        parts.append(
            f'<text class="mid" x="{x_of(tick):.1f}" y="{HEIGHT - 6}">{compact(tick)}</text>'
        )
    return x_of, y_of, "".join(parts)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    raw = (high - low) / max(count, 1)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _thin(points: Points) -> Points:
    """Return at most `POINTS` points, each the mean of a group."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(len(points) / POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
