"""Which groups' lives are traced: rows of kind "life", by buffer and generators.

Each is one stage of a group, or of a sample of it, that is over: `group`, `sample` (empty: the
group as a whole), `stage`, `start` and `end` (seconds since the epoch), and more facts. Whoever
reads them makes spans of them (`services/monitor/traces.py`).
"""

from __future__ import annotations

import xxhash


def is_traced(group_id: str, share: float) -> bool:
    """Whether a group is among the `share` of all that are traced; every process finds the same."""
    return xxhash.xxh3_64_intdigest(group_id.encode()) < share * 2.0**64
