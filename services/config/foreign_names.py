"""Staleness keys of the systems that Umbra descends from, translated in section `[buffer]`.

`docs/staleness.md` has a table of the names that other systems use.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbra.proto.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A key of another system, whose value minus `offset` is run_ahead and max_staleness."""

    system: str
    offset: int = 0


FOREIGN: dict[str, ForeignName] = {
    "async_generation_ratio": ForeignName("ROLL"),
    # It counts the running step: 2 is one step off-policy.
    "generate_ahead_steps": ForeignName("async-rl / dots.rl", offset=1),
}


def translate(section: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` of one section with names of other systems replaced by ours.

    Raises:
        UsageError: a name stands in another section than `[buffer]`, has a bad value, or
            contradicts one of our keys beside it.
    """
    result = {key: value for key, value in values.items() if key not in FOREIGN}
    for name in values.keys() & FOREIGN.keys():
        known, value = FOREIGN[name], values[name]
        if section != "buffer":
            raise UsageError(f"{where}: {name} is {known.system}'s; {_advice(known)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < known.offset:
            raise UsageError(f"{where}: buffer.{name} must be an integer >= {known.offset}")
        number = value - known.offset
        for key in ("run_ahead", "max_staleness"):
            if result.setdefault(key, number) != number:
                raise UsageError(
                    f"{where}: buffer.{name} = {value} ({known.system}) means {key} = {number}, "
                    f"but buffer.{key} is {result[key]}: remove one of them"
                )
        said = f"buffer.run_ahead = {number} and buffer.max_staleness = {number}"
        log.warning("%s: %s's %s = %s is read as %s", where, known.system, name, value, said)
    return result


def foreign_hint(name: str) -> str:
    """Return what to write instead of a name that is nearly one of `FOREIGN`, else ""."""
    close = difflib.get_close_matches(name, list(FOREIGN), n=1, cutoff=0.9)
    if not close:
        return ""
    known = FOREIGN[close[0]]
    return f"; {close[0]} is {known.system}'s: {_advice(known)}"


def _advice(known: ForeignName) -> str:
    less = f", each {known.offset} less" if known.offset else ""
    return f"in [buffer] it means run_ahead and max_staleness{less}"
