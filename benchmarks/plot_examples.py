"""Draws docs/examples.svg from the rows of worked_examples.py: a panel per example, its rewards."""

from __future__ import annotations

from html import escape

from plots import Rows, svg

WIDTH, HEIGHT, LEFT, TOP = 380, 240, 46, 34  # of a panel, and its margins


def draw(title: str, rewards: list[float], x0: int) -> str:
    """One panel at x0: the mean reward of each step's batch."""
    right, bottom = x0 + WIDTH - 20, HEIGHT - 40
    parts = [f'<text class="title" x="{x0 + LEFT}" y="20">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - tick * (bottom - TOP)
        parts.append(
            f'<line class="axis" x1="{x0 + LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            f'<text x="{x0 + LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
        )
    across = (right - x0 - LEFT) / max(1, len(rewards) - 1)
    path = " ".join(
        f"{x0 + LEFT + n * across:.1f},{bottom - reward * (bottom - TOP):.1f}"
        for n, reward in enumerate(rewards)
    )
    parts.append(f'<polyline class="line" stroke="#0969da" points="{path}"/>')
    for n, x in ((1, x0 + LEFT), (len(rewards), right)):
        parts.append(f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{n}</text>')
    return "".join(parts)


def picture(rows: Rows) -> str:
    """The whole picture as SVG."""
    names = list(dict.fromkeys(row["example"] for row in rows))
    parts = [
        draw(name, [r["reward"] for r in rows if r["example"] == name and "step" in r], n * WIDTH)
        for n, name in enumerate(names)
    ]
    middle = len(names) * WIDTH / 2
    parts.append(
        f'<text x="{middle:g}" y="{HEIGHT - 4}" text-anchor="middle">mean reward, by optimizer step'
        "</text>"
    )
    return svg(len(names) * WIDTH, HEIGHT, parts)
