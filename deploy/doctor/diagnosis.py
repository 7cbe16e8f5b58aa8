"""What a check found, checks side by side with a deadline each, and the page of all of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from umbra.proto.deadline import Deadline
from umbra.proto.errors import UmbraError
from umbra.services.reporting.tables import aligned

Result = Literal["ok", "warning", "problem", "not looked at"]
EXIT_PROBLEM = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one check found.

    Attributes:
        check: its name.
        fact: what was measured; of a check that was not made, why not.
        remedy: what to do, a sentence; empty where all is well.
    """

    check: str
    result: Result
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at: `look` measures and judges, within `limit_s` seconds."""

    name: str
    look: Callable[[], Diagnosis | list[Diagnosis]]
    limit_s: float = 20.0


def unmade(check: str, why: str) -> Diagnosis:
    """A check that could not be made."""
    return Diagnosis(check, "not looked at", why)


def examine(checks: Sequence[Check]) -> list[Diagnosis]:
    """What all `checks` found, in their order; they are made at the same time.

    Whatever hangs is left behind on a thread that does not keep this process from ending.
    """
    done: list[queue.Queue[list[Diagnosis]]] = [queue.Queue() for _ in checks]

    def make(check: Check, into: queue.Queue[list[Diagnosis]]) -> None:
        into.put(_made(check))

    deadlines: list[Deadline] = []
    for check, into in zip(checks, done, strict=True):
        deadlines.append(Deadline(check.limit_s))
        name = f"umbra-doctor {check.name}"
        threading.Thread(target=make, args=(check, into), name=name, daemon=True).start()
    found: list[Diagnosis] = []
    for check, into, deadline in zip(checks, done, deadlines, strict=True):
        try:
            found += into.get(timeout=deadline.left_s)
        except queue.Empty:
            found.append(unmade(check.name, f"no answer within {check.limit_s:g} s"))
    return found


def _made(check: Check) -> list[Diagnosis]:
    try:
        found = check.look()
    except (UmbraError, OSError) as error:
        return [unmade(check.name, str(error))]
    except Exception as error:  # noqa: BLE001 - a page with one line less is better than none
        return [unmade(check.name, f"the check itself failed: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]


def exit_code(findings: Sequence[Diagnosis]) -> int:
    """1 if there is a problem, else 0."""
    return EXIT_PROBLEM if any(one.result == "problem" for one in findings) else 0


def as_json(findings: Sequence[Diagnosis]) -> dict[str, Any]:
    """For programs."""
    return {"ok": exit_code(findings) == 0, "checks": [asdict(one) for one in findings]}


def as_text(findings: Sequence[Diagnosis]) -> list[str]:
    """Lines for people: the checks, then what to do, the worst first."""
    lines = aligned((one.check, one.result, one.fact) for one in findings)
    worst: tuple[Result, ...] = ("problem", "warning")
    todo = [one for result in worst for one in findings if one.result == result]
    lines.append("")
    if not todo:
        return [*lines, "Nothing to do."]
    return [*lines, "What to do:", *(f"- {one.check}: {one.remedy}" for one in todo)]
