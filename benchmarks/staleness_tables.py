"""What the rows of `staleness.py` say: accuracies, and what staleness costs each objective.

A loss is the accuracy on-policy less that at a staleness, in points: against the objective's own
on-policy runs, and against those of `naive`, which are the same runs for every objective whose
gradient on-policy is naive's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from report import Report, spread
from staleness_cells import CLAIM

POINTS = 2.0  # that staleness may cost
BASE, CHOSEN = "naive", "tis_opsm"
Accuracies = Mapping[tuple[str, int, str, int], list[float]]


def summarise(report: Report) -> None:
    """State tables of accuracy, losses, and what staleness the runs really had."""
    found: dict[tuple[str, int, str, int], list[float]] = defaultdict(list)
    for row in report.rows:
        place = row["task"], row["minibatches"], row["objective"], row["staleness"]
        found[place].append(row["accuracy"])
    off = [r for r in report.rows if abs(r["measured"] - r["staleness"]) > CLAIM]
    starred = {(r["task"], r["minibatches"], r["objective"], r["staleness"]) for r in off}
    objectives = _named(report.rows, found)
    levels = sorted({level for *_, level in found} - {0})
    panels = [(task, updates) for task in ("sort", "guess") for updates in (1, 4)]
    for task, updates in panels:
        name = f"{task}_{updates}"
        rows = [row for row in report.rows if (row["task"], row["minibatches"]) == (task, updates)]
        if not rows:
            continue
        report.table(
            name,
            ["objective", "on-policy", *(f"staleness {level}" for level in levels)],
            [
                [f"`{objective}`", spread(_on_policy(found, task, updates, objective), ".3f")]
                + [
                    spread(found.get(place, []), ".3f") + (" *" if place in starred else "")
                    for place in ((task, updates, objective, level) for level in levels)
                ]
                for objective in objectives
            ],
        )
        report.figure(f"{name}_before", mean(row["before"] for row in rows))
        for objective in objectives:
            for level in (0, *levels):
                values = found.get((task, updates, objective, level))
                if values:
                    report.figure(f"{name}_{objective}_{level}", mean(values))
    _losses(report, found, objectives, panels, levels)
    within = [r for r in report.rows if abs(r["measured"] - r["staleness"]) <= CLAIM]
    report.figure("runs", len(report.rows))
    report.figure("runs_as_meant", len(within))
    report.figure("runs_off", len(off))
    report.figure("off_least", min((r["measured"] for r in off), default=None))
    report.figure("off_most", max((r["measured"] for r in off), default=None))
    gaps = [abs(row["measured"] - row["staleness"]) for row in report.rows]
    report.goal("staleness of every run, versions from what was meant", max(gaps), "<=", CLAIM)


def _losses(
    report: Report,
    found: Accuracies,
    objectives: Sequence[str],
    panels: Sequence[tuple[str, int]],
    levels: Sequence[int],
) -> None:
    rows: list[list[Any]] = []
    for objective in objectives:
        cells: list[tuple[tuple[str, int, int], float, float]] = []
        for task, updates in panels:
            for level in levels:
                values = found.get((task, updates, objective, level))
                own = _on_policy(found, task, updates, objective)
                base = found.get((task, updates, BASE, 0))
                if values and own and base:
                    place = (task, updates, level)
                    now = mean(values)
                    cells.append((place, 100 * (mean(own) - now), 100 * (mean(base) - now)))
        if not cells:
            continue
        own_losses, base_losses = [loss for _, loss, _ in cells], [loss for *_, loss in cells]
        met = sum(loss <= POINTS for loss in own_losses)
        rows.append(
            [
                f"`{objective}`",
                f"{mean(own_losses):.1f} ({max(own_losses):.1f})",
                f"{mean(base_losses):.1f} ({max(base_losses):.1f})",
                f"{met} of {len(cells)}",
            ]
        )
        report.figure(f"{objective}_loss", round(mean(own_losses), 1))
        report.figure(f"{objective}_loss_most", round(max(own_losses), 1))
        report.figure(f"{objective}_cells_met", met)
        report.figure("cells", len(cells))
        if objective == CHOSEN:
            early = [loss for (*_, level), loss, _ in cells if level <= 2]
            report.figure("early_cells", len(early))
            report.figure("early_within", sum(loss <= 2.5 for loss in early))
            for task, updates in panels:
                some = [loss for place, loss, _ in cells if place[:2] == (task, updates)]
                if not some:
                    continue
                report.figure(f"{objective}_{task}_{updates}_loss_most", round(max(some), 1))
                report.figure(f"{objective}_{task}_{updates}_loss_at_8", round(some[-1], 1))
            report.goal(f"largest loss of `{objective}`, points", max(own_losses), "<=", POINTS)
    columns = ["objective", "its own on-policy runs", f"those of `{BASE}`", "within 2 points"]
    report.table("losses", columns, rows)


def _on_policy(found: Accuracies, task: str, updates: int, objective: str) -> list[float]:
    own = found.get((task, updates, objective, 0))
    return own or found.get((task, updates, BASE, 0), [])


def _named(rows: Sequence[Mapping[str, Any]], found: Accuracies) -> list[str]:
    """All objectives that were run at a staleness, the chosen one first."""
    names = dict.fromkeys(row["objective"] for row in rows if row["staleness"])
    order = [CHOSEN, "ppo", "tis", "m2po", "decoupled", BASE]
    return [one for one in order if one in names] + [one for one in names if one not in order]
