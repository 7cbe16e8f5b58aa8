"""The outcome of the comparisons of a model, and how far rounding alone may take a number.

Both sides compute in float32 and add up in another order. An error grows with the numbers that are
added, and with the square root of their count: the entries of a hidden state in every layer. The
errors of the tests' tiny models stay ten times below these bounds; a wrong mask is thousands of
times above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from umbra.services.modeling.reference import Expected
from umbra.services.reporting.tables import aligned

_LOGPROBS = 1e-5  # nats, for a largest logit of 1
_GRADIENTS = 3e-5  # of a gradient's norm
_VLLM = 1e-4  # nats, whatever the logits
_VLLM_BFLOAT16 = 0.05  # nats, in the mean over tokens
_HIDDEN, _LAYERS = 64, 2  # at which these were measured


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
        heading = [f"{self.model}: {self.architecture}"]
        heading += [f"compared on a copy with {cut}" for cut in self.cuts]
        rows = [(row.name, row.outcome, row.as_text()) for row in self.rows]
        return "\n".join([*heading, *aligned(rows)])


def difference(name: str, found: Tensor, expected: Expected, config: Any) -> Row:
    """Return the row of the token whose logprob is farthest off; [T] each."""
    bounds = _LOGPROBS * _growth(config) * expected.scale.clamp(min=1)
    off = (found - expected.logprobs).abs()
    at = int((off / bounds).argmax())  # a NaN counts as the largest
    return Row(name, float(off[at]), float(bounds[at]), "nats")


def gradient_bound(config: Any) -> float:
    """Return the largest norm of a difference of gradients, relative to the gradient's norm."""
    return _GRADIENTS * _growth(config)


def vllm_bound(config: Any, dtype: str = "float32") -> float:
    """Return the bound for logprobs of vLLM's kernels, in nats."""
    return _VLLM * _growth(config) if dtype == "float32" else _VLLM_BFLOAT16


def _growth(config: Any) -> float:
    added = max(config.hidden_size, _HIDDEN) * max(config.num_hidden_layers, _LAYERS)
    # A gated delta net solves for the updates of 64 tokens at once, and rounding grows as it does.
    solved = 10 if hasattr(config, "linear_key_head_dim") else 1
    return solved * (added / (_HIDDEN * _LAYERS)) ** 0.5
