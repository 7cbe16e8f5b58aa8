"""Failures counted by reason, under `failed: <reason>`; reasons come from user code, so they may be
any number of different texts.
"""

from __future__ import annotations

from collections import Counter

from umbra.proto.bounds import one_line

PREFIX = "failed: "
REASONS_KEPT = 50  # distinct ones that are counted by name; others share one count
REASON_CHARS = 100
OTHER = PREFIX + "other"


def count_reason(counters: Counter[str], reason: str) -> bool:
    """Count a failure; whether it is the first of its name."""
    key = PREFIX + (one_line(reason[:REASON_CHARS]) or "no reason given")
    if key not in counters:
        known = sum(name.startswith(PREFIX) for name in counters)
        if known >= REASONS_KEPT:
            key = OTHER
    counters[key] += 1
    return counters[key] == 1
