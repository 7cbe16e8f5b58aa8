"""What `umbra check` found: one record per fact, in one list, printed or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from umbra.services.reporting.tables import aligned

Level = Literal["ok", "warning", "problem", "not looked at"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about `subject`; `remedy` is empty where there is nothing to do."""

    subject: str
    level: Level
    text: str
    remedy: str = ""


def refusal(subject: str, sentence: str) -> Finding:
    """Return the problem in the sentence of an error, whose last part is the remedy."""
    what, _, remedy = sentence.rpartition("; " if "; " in sentence else ": ")
    return Finding(subject, "problem", what or sentence, remedy)


def has_problem(found: Sequence[Finding]) -> bool:
    return any(one.level == "problem" for one in found)


def as_text(found: Sequence[Finding]) -> list[str]:
    """Return lines for people: the findings, then what to do, problems first."""
    lines = aligned((one.subject, one.level, one.text) for one in found)
    todo = [
        f"- {one.subject}: {one.remedy}"
        for level in ("problem", "warning")
        for one in found
        if one.level == level and one.remedy
    ]
    return [*lines, "", *(["What to do:", *todo] if todo else ["Nothing to do."])]
