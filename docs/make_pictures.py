"""Draws the pictures of docs/: `python docs/make_pictures.py` rewrites the .svg files beside it.

Boxes and arrows as data, so that a change of the architecture is a change of a few lines here.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:14px;fill:#1b1f24}"
    ".small{font-size:12px;fill:#57606a}.box{stroke-width:1.5;rx:8}"
    ".arrow{fill:none;stroke:#57606a;stroke-width:1.5;marker-end:url(#head)}"
    ".dashed{stroke-dasharray:5 4}"
)
HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#57606a"/>'
    "</marker></defs>"
)


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of small text, top left at (x, y)."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = "#ddf4ff"
    edge: str = "#0969da"

    def svg(self) -> str:
        """Return the box as SVG."""
        middle = self.x + self.width // 2
        top = self.y + self.height // 2 - 8 * len(self.lines) + 5
        rows = "".join(
            f'<text class="small" x="{middle}" y="{top + 18 * (n + 1)}" text-anchor="middle">'
            f"{escape(line)}</text>"
            for n, line in enumerate(self.lines)
        )
        return (
            f'<rect class="box" x="{self.x}" y="{self.y}" width="{self.width}" '
            f'height="{self.height}" fill="{self.fill}" stroke="{self.edge}"/>'
            f'<text x="{middle}" y="{top}" text-anchor="middle" font-weight="600">'
            f"{escape(self.title)}</text>{rows}"
        )


@dataclass(frozen=True)
class Arrow:
    """A path with a label at (label_x, label_y)."""

    path: str
    label: str = ""
    label_x: int = 0
    label_y: int = 0
    dashed: bool = False
    both: bool = False
    anchor: str = "middle"

    def svg(self) -> str:
        """Return the arrow as SVG."""
        style = "arrow dashed" if self.dashed else "arrow"
        start = ' marker-start="url(#head)"' if self.both else ""
        lines = "".join(
            f'<text class="small" x="{self.label_x}" y="{self.label_y + 15 * n}" '
            f'text-anchor="{self.anchor}">{escape(line)}</text>'
            for n, line in enumerate(self.label.split("\n"))
            if line
        )
        return f'<path class="{style}" d="{self.path}"{start}/>{lines}'


def picture(width: int, height: int, parts: list[Box | Arrow]) -> str:
    """Return a whole SVG file on a white ground."""
    body = "\n".join(part.svg() for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{STYLE}</style>{HEAD}'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


GREEN = {"fill": "#dafbe1", "edge": "#1a7f37"}
YELLOW = {"fill": "#fff8c5", "edge": "#9a6700"}
GREY = {"fill": "#f6f8fa", "edge": "#57606a"}

PROCESSES = picture(
    860,
    500,
    [
        Box(330, 10, 200, 50, "monitor, commands", (), **GREY),
        Arrow("M430 60 V110", "attach and leave at any time", 440, 90, both=True, dashed=True,
              anchor="start"),
        Box(20, 130, 200, 96, "generators", ("engine, environments", "come and go"), **GREEN),
        Box(330, 110, 200, 136, "buffer", ("prompts, leases, groups", "staleness gate and sweep",
                                           "ledger, membership")),
        Box(640, 130, 200, 96, "trainer", ("policy, optimizer, losses", "on all ranks"), **GREEN),
        Arrow("M330 160 H220", "samples", 275, 152),
        Arrow("M220 198 H330", "trajectories", 275, 216),
        Arrow("M530 160 H640", "batches", 585, 152),
        Arrow("M640 198 H530", "commits", 585, 216),
        Box(170, 300, 520, 60, "weights arena: shared memory, two version slots", (), **GREY),
        Arrow("M665 226 V300", "snapshot", 672, 268, anchor="start"),
        Arrow("M195 300 V226", "stage, verify", 203, 268, anchor="start"),
        Box(330, 410, 200, 70, "weight hub", ("versions, staged pushes",), **YELLOW),
        Arrow("M430 410 V360", "owns, grants slots", 440, 390, both=True, anchor="start"),
        Arrow("M330 445 H70 V226", "prepare, ready, commit", 200, 437, both=True),
        Arrow("M530 445 H790 V226", "manifest, publish", 660, 437, both=True),
    ],
)  # fmt: skip

LIFE = picture(
    900,
    300,
    [
        Box(20, 90, 110, 60, "queued"),
        Box(190, 90, 120, 60, "generating", (), **GREEN),
        Box(370, 90, 110, 60, "ready"),
        Box(540, 90, 120, 60, "training", (), **GREEN),
        Box(720, 90, 150, 60, "trained", (), **YELLOW),
        Box(370, 210, 290, 60, "ended", ("stale, failed, cancelled",), **GREY),
        Arrow("M130 120 H190", "lease", 160, 112),
        Arrow("M310 120 H370", "submit", 340, 112),
        Arrow("M480 120 H540", "batch", 510, 112),
        Arrow("M660 120 H720", "commit", 690, 112),
        Arrow("M250 90 C 250 30, 75 30, 75 90",
              "lease lost, or handed back as a partial", 162, 36),
        Arrow("M430 150 V210", "sweep: past the bound", 440, 184, anchor="start"),
        Arrow("M250 150 C 250 225, 290 230, 370 230", "gave up", 262, 190, anchor="start"),
        Arrow("M75 150 C 75 255, 250 254, 370 254", "run over", 100, 262, anchor="start"),
    ],
)  # fmt: skip


def main() -> None:
    """Write the pictures."""
    (HERE / "processes.svg").write_text(PROCESSES, encoding="utf-8")
    (HERE / "sample-life.svg").write_text(LIFE, encoding="utf-8")


if __name__ == "__main__":
    main()
