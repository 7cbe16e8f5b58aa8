"""Figures of a run, and the numbers and tables in which people read them.

`docs/operate.md` lists all figures; each is computed here, or in one other place: recent rates and
shares of what teaches nothing in `buffer/health.py`, rates of a whole run in
`deploy/report.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import comb

PHASES = ("snapshot", "wire", "stage", "commit", "total")  # of a push, in this order
IDLE = ("idle", "wait")  # what activities begin with that are idleness


def is_idle(activity: str) -> bool:
    """Return whether a service that does `activity` only waits."""
    return activity.startswith(IDLE)


def cause_of(activity: str) -> str:
    """Return the cause of an idle activity: `work` of "idle: work", `batch` of "wait_batch"."""
    return re.sub("^(idle: |wait_|idle|wait)(?=.)", "", activity)


def busy(seconds: Mapping[str, float]) -> float:
    """Return the share of `seconds`, by activity, in which a service did anything but wait."""
    total = sum(seconds.values())
    return sum(s for name, s in seconds.items() if not is_idle(name)) / total if total else 0.0


def idle_causes(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the recorded time that were idle, by cause, largest first."""
    total = sum(seconds.values())
    idle = {cause_of(name): s / total for name, s in seconds.items() if is_idle(name) and total}
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def staleness(oldest: int, newest: int, version: int) -> tuple[int, int, int]:
    """Return the staleness of a sample as `(total, in flight, in queue)`, in versions.

    Its tokens are of versions `oldest` to `newest`, and it is trained on at `version`. In flight is
    the part that passed while it was generated, in queue the rest.
    """
    total = version - oldest
    in_flight = min(total, newest - oldest)
    return total, in_flight, total - in_flight


SOLVED = 1.0  # reward from which on an answer solves its prompt


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """Return the chance that one of `k` answers solves the prompt; of `answers`, `solved` do.

    1 - C(n - c, k) / C(n, k): unbiased, unlike 1 - (1 - c / n)^k. Chen et al. 2021, arXiv
    2107.03374, eq. 1.

    Raises:
        ValueError: there are fewer than `k` answers, or more solved than there are.
    """
    if not 0 <= solved <= answers or not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {answers} answers, {solved} solved")
    return 1 - comb(answers - solved, k) / comb(answers, k)


def shown_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Return scores to show beside accuracy; none with one answer per prompt: all are equal."""
    return dict(scores) if len(scores) > 2 else {}


def eval_scores(rewards: Mapping[str, Sequence[float]], answers: int) -> dict[str, float]:
    """Return `pass@k` for k = 1, 2, 4, ... and `answers`, and `mean@answers`; means over prompts.

    `mean@k` is the mean reward of k answers (avg@k elsewhere). Prompts with fewer than k answers
    are left out, and a score that no prompt has enough answers for. `rewards` are by prompt id, and
    count answers that failed as 0; each prompt should have `answers`.
    """
    scores: dict[str, float] = {}
    for k in sorted({1 << power for power in range(answers.bit_length())} | {answers}):
        chances = [
            pass_at_k(len(values), sum(reward >= SOLVED for reward in values), k)
            for values in rewards.values()
            if len(values) >= k
        ]
        if chances:
            scores[f"pass@{k}"] = sum(chances) / len(chances)
    means = [sum(values) / len(values) for values in rewards.values() if len(values) >= answers]
    if means:
        scores[f"mean@{answers}"] = sum(means) / len(means)
    return scores


GAP = "  "


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return each row as a line, with columns as wide as their widest cell.

    The heading is a row like the others; cells of columns `right` end at the same place.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def number(value: float | None, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, integers in full: "1,234", "12.3", "0.0457".

    None is "-".
    """
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(count: float) -> str:
    """Return bytes in binary units: "512 B", "1.5 GiB"."""
    for unit, name in _SIZES:
        if abs(count) >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count:.0f} B"


def clock(seconds: float) -> str:
    """Return a duration as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counts(values: Mapping[str, int]) -> str:
    """Return the counts without zeros: "3 stale, 12 failed"."""
    return ", ".join(f"{count:,} {name}" for name, count in values.items() if count)
