"""What the rows of `end_to_end.py` say: tables by mode, ratios, bounds and goals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import demo_cells
import replay_cells
from report import Report, spread, text

Rows = Sequence[dict[str, Any]]


def summarise(report: Report) -> None:
    """State what the rows of either form can tell."""
    if replay := [row for row in report.rows if row["form"] == replay_cells.FORM]:
        _replay(report, replay)
    if real := [row for row in report.rows if row["form"] == demo_cells.FORM]:
        _real(report, real)


def _replay(report: Report, rows: Rows) -> None:
    columns = ["lengths", "mode", "samples/s", "tokens/s", "step s", "of the ideal"]
    table: list[list[Any]] = []
    speeds: dict[tuple[str, str], float] = {}
    for mix in replay_cells.MIXES:
        for mode in replay_cells.MODES:
            some = [row for row in rows if (row["mix"], row["mode"]) == (mix, mode.name)]
            if not some:
                continue
            speeds[mix, mode.name] = mean(row["samples_per_s"] for row in some)
            table.append(
                [
                    mix,
                    mode.name,
                    spread(_column(some, "samples_per_s")),
                    mean(_column(some, "tokens_per_s")),
                    spread(_column(some, "step_s")),
                    f"{mean(_column(some, 'utilisation')):.0%}",
                    *_last_cells(some),
                ]
            )
            name = f"{_key(mix)}_{_key(mode.name)}"
            report.figure(f"{name}_least_of_ideal", min(row["utilisation"] for row in some))
            report.figure(f"{name}_most_of_ideal", max(row["utilisation"] for row in some))
            report.figure(f"{name}_dropped", sum(row["dropped"] for row in some))
    report.table("replay", [*columns, *_LAST_COLUMNS], table)
    for mix in replay_cells.MIXES:
        fast = speeds.get((mix, replay_cells.ASYNCHRONOUS))
        if fast is None:
            continue
        for other in replay_cells.MODES[:-1]:
            if slow := speeds.get((mix, other.name)):
                report.figure(f"{_key(mix)}_over_{_key(other.name)}", fast / slow)
        for name in replay_cells.SYNCHRONOUS:
            if not (slow := speeds.get((mix, name))):
                continue
            if mix == "long-tailed":
                report.goal(f"{mix}: asynchronous over {name}", fast / slow, ">=", 2.0)
            mode = next(one for one in replay_cells.MODES if one.name == name)
            best_s = replay_cells.turns_s(mode, mix)
            best = replay_cells.SAMPLES / best_s
            report.figure(f"{_key(mix)}_{_key(name)}_lossless_step_s", best_s)
            report.figure(f"{_key(mix)}_over_lossless_{_key(name)}", fast / best)
            report.figure(f"{_key(mix)}_{_key(name)}_slower_than_lossless", best / slow - 1)
        least = report.figures[f"{_key(mix)}_{replay_cells.ASYNCHRONOUS}_least_of_ideal"]
        report.goal(f"{mix}: of the computed ideal, the least of the seeds", least, ">=", 0.95)


def _real(report: Report, rows: Rows) -> None:
    for task in dict.fromkeys(row["mix"] for row in rows):
        modes: dict[str, Rows] = {}
        for row in rows:
            if row["mix"] == task:
                modes[row["mode"]] = [*modes.get(row["mode"], []), row]
        columns = ["mode", "seeds", "s to 90 %", "steps to it", "samples/s", "tokens/s", "step s"]
        report.table(
            task,
            [*columns, "final reward", *_LAST_COLUMNS],
            [
                [
                    name,
                    len(some),
                    _to_accuracy(some),
                    spread(_column(some, "to_accuracy_steps"), ".0f"),
                    spread(_column(some, "samples_per_s")),
                    mean(_column(some, "tokens_per_s")),
                    mean(_column(some, "step_s")),
                    f"{mean(_column(some, 'final_reward')):.3f}",
                    *_last_cells(some),
                ]
                for name, some in modes.items()
            ],
        )
        _gain(report, task, modes)


def _to_accuracy(rows: Rows) -> str:
    """Seconds of the runs that got there, and how many did if not all."""
    times = _column(rows, "to_accuracy_s")
    short = f", {len(times)} of {len(rows)}" if len(times) < len(rows) else ""
    return spread(times, ".1f") + short


def _gain(report: Report, task: str, modes: dict[str, Rows]) -> None:
    """How much faster it is asynchronously, and how much of what there was to win that is."""
    times = {name: mean(_column(some, "to_accuracy_s")) for name, some in modes.items()
             if all(row["to_accuracy_s"] is not None for row in some)}  # fmt: skip
    synchronous = [name for name in demo_cells.SYNCHRONOUS if name in times]
    asynchronous = [name for name in demo_cells.ASYNCHRONOUS if name in times]
    if not synchronous or not asynchronous:
        return
    # Each side with what suits it: who takes turns has the better split, TRL the better number of
    # threads, and this the better number of generators.
    best, ahead = (min(some, key=times.__getitem__) for some in (synchronous, asynchronous))
    fast, quick = modes[ahead], times[ahead]
    report.figure(f"{task}_better_asynchronous", ahead)
    for name, seconds in times.items():
        report.figure(f"{task}_{_key(name)}_s", seconds)
        report.figure(f"{task}_over_{_key(name)}", seconds / quick)
        speeds = [mean(_column(some, "samples_per_s")) for some in (fast, modes[name])]
        report.figure(f"{task}_samples_over_{_key(name)}", speeds[0] / speeds[1])
    slow = modes[best]
    report.figure(f"{task}_better_synchronous", best)
    report.figure(f"{task}_over_the_better_synchronous", times[best] / quick)
    report.goal(
        f"{task}: time to 90 %, over the better synchronous", times[best] / quick, ">=", 1.5
    )
    # A run of TRL that does not get there counts with the time that it was given.
    peers = [
        mean(row["to_accuracy_s"] or row["curve"][-1][0] for row in some)
        for name, some in modes.items()
        if name.startswith("TRL")
    ]
    if peers:
        report.figure(f"{task}_over_the_better_trl", min(peers) / quick)
        report.goal(f"{task}: time to 90 %, over the better of TRL", min(peers) / quick, ">=", 3.0)
    # A step can be no shorter than its generation, nor than its CPU seconds on all cores.
    step_s, generation_s = mean(_column(slow, "step_s")), mean(_column(slow, "generation_s"))
    cpu_s = mean(sum(row["cpu_s"].values()) / row["steps"] for row in fast)
    bound_s = max(generation_s, cpu_s / demo_cells.CORES)
    now_s = mean(_column(fast, "step_s"))
    report.figure(f"{task}_sync_step_s", step_s)
    report.figure(f"{task}_sync_generation_s", generation_s)
    report.figure(f"{task}_sync_training_s", mean(_column(slow, "training_s")))
    report.figure(f"{task}_cpu_s_a_step", cpu_s)
    report.figure(f"{task}_bound_s", bound_s)
    report.figure(f"{task}_bound", step_s / bound_s)
    report.figure(f"{task}_step_speed_up", step_s / now_s)
    if step_s > bound_s:
        report.figure(f"{task}_won_of_step", (step_s - now_s) / (step_s - bound_s))


_LAST_COLUMNS = ["idle: generators / trainer / buffer / hub", "staleness mean (max)"]


def _last_cells(rows: Rows) -> list[str]:
    if "generator_idle" not in rows[0]:
        return ["-", "-"]
    idle = [
        f"{100 * mean(row[name] for row in rows):.0f}"
        for name in ("generator_idle", "trainer_idle", "buffer_idle", "hub_idle")
    ]
    most = max(row["staleness_max"] for row in rows)
    return [f"{' / '.join(idle)} %", f"{text(mean(_column(rows, 'staleness')))} ({most:.0f})"]


def _column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


def _key(name: str) -> str:
    name = name.removeprefix("sync, ")
    for mark in ("`", "(", ")", ","):
        name = name.replace(mark, "")
    return name.replace(" ", "_").replace("-", "_")
