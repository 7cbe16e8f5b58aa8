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
    """Lines over a common x; an empty text if there is nothing to draw."""
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
    """A histogram over 0, 1, 2, ...; an empty text if there is nothing to draw."""
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


def stacked_chart(
    layers: Sequence[tuple[str, str, Sequence[float]]], *, seconds: float, title: str
) -> str:
    """Shares of the time, one column per bin; a layer is `(name, class of its colour, shares)`."""
    if not layers:
        return ""
    x_of, y_of, axes = _frame(0.0, seconds, 0.0, 1.0)
    count = len(layers[0][2])
    heights = [0.0] * count
    parts = []
    for name, colour, shares in layers:
        path = []
        for index, share in enumerate(shares):
            if share <= 0:
                continue
            bottom, top = heights[index], min(1.0, heights[index] + share)
            heights[index] = top
            left, right = x_of(seconds * index / count), x_of(seconds * (index + 1) / count)
            path.append(f"M{left:.1f} {y_of(bottom):.1f}H{right:.1f}V{y_of(top):.1f}H{left:.1f}Z")
        parts.append(
            f'<path class="{colour}" d="{"".join(path)}"><title>{escape(name)}</title></path>'
        )
    return _figure(title, "".join(parts) + axes)


def gantt(tracks: Mapping[str, Sequence[tuple[str, str, float, float]]], *, seconds: float) -> str:
    """Tracks with their spans `(name, class of its colour, start, end)`, from 0 to `seconds`."""
    left, row, width = 150, 18, 900
    height = row * len(tracks) + 22
    scale = (width - left) / max(seconds, 1e-9)
    parts = []
    for index, (track, spans) in enumerate(tracks.items()):
        y = index * row
        parts.append(f'<text class="end" x="{left - 6}" y="{y + 13}">{escape(track)}</text>')
        for name, colour, start, end in spans:
            begin, until = max(0.0, start), min(seconds, end)
            size = f'width="{max(0.4, (until - begin) * scale):.2f}" height="{row - 4}"'
            place = f'x="{left + begin * scale:.2f}" y="{y + 2}"'
            told = f"<title>{escape(name)} {1e3 * (end - start):.1f} ms</title>"
            parts.append(f'<rect class="{colour}" {place} {size}>{told}</rect>')
    for tick in _ticks(0.0, seconds, 6):
        x = left + tick * scale
        parts.append(f'<text class="mid" x="{x:.1f}" y="{height - 6}">{tick:g} s</text>')
    return (
        f'<svg class="wide" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="timeline">{"".join(parts)}</svg>'
    )


def _figure(title: str, inner: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{inner}</svg></figure>'
    )


def _frame(
    x_min: float, x_max: float, y_min: float, y_max: float, *, whole: bool = False
) -> tuple[Scale, Scale, str]:
    """Scales of both axes, and the axes themselves."""
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
    """About `count` round numbers from `low` to `high`."""
    raw = (high - low) / max(count, 1)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _thin(points: Points) -> Points:
    """At most `POINTS` points, each the mean of those that it stands for."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(len(points) / POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
