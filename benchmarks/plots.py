"""What the plots of docs/ share: rows of a benchmark in, one SVG out. `render.py` draws them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#1b1f24}"
    ".title{font-weight:600;font-size:14px}.axis{stroke:#d0d7de}.line{fill:none;stroke-width:2}"
    ".ideal{stroke:#1b1f24;stroke-dasharray:4 3}"
)
Rows = list[dict[str, Any]]


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    """A whole SVG file on a white ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )
