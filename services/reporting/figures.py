"""What the figures of a run mean: each is computed here, or in one other place that is named here.

`docs/monitor.md` lists all of them. Recent rates are the buffer's (`buffer/meter.py`), shares of
what teaches nothing too (`buffer/health.py`); rates of a whole run are in `deploy/summary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES = ("snapshot", "wire", "stage", "commit", "total")  # of a push, in this order
IDLE = ("idle", "wait")  # what activities begin with that are idleness


def is_idle(activity: str) -> bool:
    """Whether a service that does `activity` only waits."""
    return activity.startswith(IDLE)


def cause_of(activity: str) -> str:
    """What an idle activity waits for: `work` of "idle: work", `batch` of "wait_batch"."""
    for begin in ("idle: ", "wait_", "idle", "wait"):
        if activity.startswith(begin) and len(activity) > len(begin):
            return activity.removeprefix(begin)
    return activity


def busy(spent: Mapping[str, float]) -> float:
    """The share of the time that is accounted for in which a service did anything but wait.

    Args:
        spent: seconds, or shares of the time, by activity.
    """
    total = sum(spent.values())
    return sum(s for name, s in spent.items() if not is_idle(name)) / total if total else 0.0


def idle_causes(spent: Mapping[str, float]) -> dict[str, float]:
    """The shares of the time that is accounted for that are idleness, by cause, largest first."""
    total = sum(spent.values())
    idle = {cause_of(name): s / total for name, s in spent.items() if is_idle(name) and total}
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def staleness(oldest: int, newest: int, version: int) -> tuple[int, int, int]:
    """Staleness of a sample as `(total, in flight, in queue)`, in versions.

    Its tokens are of versions `oldest` to `newest`, and it is trained on at `version`. In flight is
    the part that passed while it was generated, in queue the rest.
    """
    total = version - oldest
    in_flight = min(total, newest - oldest)
    return total, in_flight, total - in_flight
