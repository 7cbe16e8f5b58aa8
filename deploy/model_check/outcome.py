"""What the comparisons of a model came to, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
        """Whether nothing that was compared differs."""
        return all(row.outcome != "different" for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [{**asdict(row), "outcome": row.outcome} for row in self.rows]
        for row in rows:
            if row["worst"] is not None and not math.isfinite(row["worst"]):
                row["worst"] = None  # JSON has no name for it
        return {**asdict(self), "cuts": list(self.cuts), "rows": rows, "equal": self.equal}

    def as_text(self) -> str:
        """A table for people."""
        lines = [f"{self.model}: {self.architecture}"]
        lines += [f"compared on a copy with {cut}" for cut in self.cuts]
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            figures = ""
            if row.worst is not None and math.isfinite(row.worst):
                figures = f"{row.worst:.1e} {row.unit}, at most {row.bound:.1e}"
                if not row.bound:
                    figures = "bit for bit" if not row.worst else f"{row.worst:.0f} {row.unit}"
            note = f" ({row.note})" if row.note else ""
            lines.append(f"{row.name:<{width}}  {row.outcome:<9}  {figures}{note}".rstrip())
        return "\n".join(lines)
