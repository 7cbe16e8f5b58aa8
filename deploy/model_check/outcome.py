"""What the comparisons of a model came to, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from umbra.services.reporting.tables import aligned


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    `worst` is the largest difference and `bound` what rounding may make of it, in `unit`. A row
    without `worst` was left out, and `note` says why; where it is no number, nothing came out.
    """

    name: str
    worst: float | None
    bound: float
    unit: str
    note: str = ""

    @property
    def outcome(self) -> str:
        """ "equal", "different" or "left out"."""
        if self.worst is None:
            return "left out"
        # Not the other way round: a difference that is no number is one.
        return "equal" if self.worst <= self.bound else "different"

    def as_text(self) -> str:
        """The difference and its bound, and the note, for people."""
        figures = ""
        if self.worst is not None and math.isfinite(self.worst):
            if self.bound:
                figures = f"{self.worst:.1e} {self.unit}, at most {self.bound:.1e}"
            else:
                figures = f"{self.worst:.0f} {self.unit}" if self.worst else "bit for bit"
        return f"{figures} ({self.note})".lstrip() if self.note else figures


@dataclass(frozen=True, slots=True)
class Outcome:
    """All comparisons of one model; `cuts` tell what its copy lacks."""

    model: str
    architecture: str
    model_type: str
    cuts: Sequence[str]
    rows: Sequence[Row]

    @property
    def equal(self) -> bool:
        return all(row.outcome != "different" for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "outcome": row.outcome} for row in self.rows]
        for row in rows:
            if row["worst"] is not None and not math.isfinite(row["worst"]):
                row["worst"] = None  # JSON has no name for it
        return {**asdict(self), "cuts": list(self.cuts), "rows": rows, "equal": self.equal}

    def as_text(self) -> str:
        """A table for people."""
        heading = [f"{self.model}: {self.architecture}"]
        heading += [f"compared on a copy with {cut}" for cut in self.cuts]
        rows = [(row.name, row.outcome, row.as_text()) for row in self.rows]
        return "\n".join([*heading, *aligned(rows)])
