"""What the plots of docs/ share: rows in, one SVG beside this file out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
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


def plot(name: str, picture: Callable[[Rows], str], usage: str | None) -> None:
    """Write `picture` of the rows in the files that the command line names to docs/`name`."""
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    rows: Rows = []
    for file in sys.argv[1:]:
        rows += json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
    (HERE / name).write_text(picture(rows), encoding="utf-8")
