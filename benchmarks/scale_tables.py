"""What the rows of `scale.py` say: a table of each study, beside what others have published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report import Report

Row = dict[str, Any]
TURNS, ASYNC = "synchronous, all take turns", "asynchronous"
# Seconds per step that verl's documentation names, by GPUs: synchronous, asynchronous.
VERL = {32: (790.1, 294.8), 64: (365.3, 189.3), 128: (356.3, 150.6)}
AREAL = {"synchronous": 41.0, "asynchronous": 14.8}  # hours of 1,000 steps, AReaL's table 1
APR_HOURS = 67 + 34 / 60, 33 + 2 / 60  # without and with partials, verl-recipe PR 58


def summarise(report: Report) -> None:
    """State the tables that the rows suffice for."""
    studies: dict[str, dict[str, Row]] = {}
    for row in report.rows:
        studies.setdefault(row["study"], {})[row["case"]] = row
    for name, cases in studies.items():
        STUDIES[name](report, cases)


def _generators(report: Report, cases: dict[str, Row]) -> None:
    table: list[list[Any]] = []
    rates: dict[tuple[str, int], float] = {}
    for case, row in cases.items():
        mode, count = case.split("/")[0], int(case.split("/")[1])
        rates[mode, count] = row["samples_per_s"]
        gpus = count + row["trainer_gpus"] if mode == ASYNC else row["generators"]
        table.append(
            [
                count,
                gpus,
                mode,
                row["samples_per_s"],
                f"{row['samples_per_s'] / count:.3f}",
                row["step_s"],
                f"{row['slots']:.0%}",
                f"{row['trainer'].get('train', 0.0):.0%}",
                f"{row['staleness']['mean']:.2f} ({row['staleness']['max']:.0f})",
                f"{row['lag_s']:.1f}",
                f"{row['broker_busy']:.1%}",
                row["broker_per_s"],
                f"{1e3 * row['broker_wait_s']:.1f}",
            ]
        )
    columns = ["generators", "GPUs", "mode", "samples/s", "per generator", "step s"]
    columns += ["slots in use", "trainer trains", "staleness mean (max)", "served after s"]
    report.table("generators", [*columns, "broker busy", "requests/s", "wait in line ms"], table)
    ratios = [
        rate / rates[TURNS, count]
        for (mode, count), rate in rates.items()
        if mode == ASYNC and (TURNS, count) in rates
    ]
    report.figure("over_turns_least", min(ratios))
    report.figure("over_turns_most", max(ratios))
    each = [rate / count for (mode, count), rate in rates.items() if mode == ASYNC]
    report.figure("per_generator_least", min(each))
    report.figure("per_generator_most", max(each))
    runs = [row for case, row in cases.items() if case.startswith(f"{ASYNC}/")]
    most = max(runs, key=lambda row: row["generators"])
    report.figure("broker_wait_most_ms", 1e3 * most["broker_wait_s"])
    report.figure("lag_most_s", most["lag_s"])
    busy = [row for row in runs if row["generators"] >= 512]  # few are asked for work too often
    costs = [1e3 * row["broker_busy"] / row["samples_per_s"] for row in busy]
    report.figure("broker_ms_least", min(costs))
    report.figure("broker_ms_most", max(costs))
    report.figure("broker_saturates_at", 1e3 / costs[-1])


def _modes(report: Report, cases: dict[str, Row]) -> None:
    base = cases[TURNS]["samples_per_s"]
    table: list[list[Any]] = []
    for case, row in cases.items():
        counts = row["staleness_counts"]
        shares = [
            f"{age}: {n / sum(counts):.0%}"
            for age, n in enumerate(counts)
            if 200 * n >= sum(counts)
        ]
        table.append(
            [
                case,
                row["samples_per_s"],
                f"{row['samples_per_s'] / base:.2f}",
                row["step_s"],
                f"{row['slots']:.0%}",
                f"{row['generator'].get('work', 0.0):.0%}",
                f"{row['trainer'].get('wait_batch', 0.0):.0%}",
                ", ".join(shares),
            ]
        )
    columns = ["mode", "samples/s", "over taking turns", "step s", "slots in use"]
    columns += ["generators wait for work", "trainer waits for a batch", "staleness"]
    report.table("modes", columns, table)


def _splits(report: Report, cases: dict[str, Row]) -> None:
    report.table(
        "splits",
        ["GPUs that train", "generate", "samples/s", "step s", "slots in use", "trainer trains",
         "staleness mean"],
        [
            [int(case), row["generators"], row["samples_per_s"], row["step_s"],
             f"{row['slots']:.0%}", f"{row['trainer'].get('train', 0.0):.0%}",
             f"{row['staleness']['mean']:.2f}"]
            for case, row in cases.items()
        ],
    )  # fmt: skip


def _failures(report: Report, cases: dict[str, Row]) -> None:
    base = cases["none"]["samples_per_s"]
    report.table(
        "failures",
        ["dies", "deaths", "samples/s", "of undisturbed", "tokens decoded for nothing",
         "steps repeated", "samples taken back"],
        [
            [case, sum(row["failures"].values()), row["samples_per_s"],
             f"{row['samples_per_s'] / base:.1%}", row["lost_tokens"],
             row["counters"].get("steps_repeated", 0), row["counters"].get("taken_back", 0)]
            for case, row in cases.items()
        ],
    )  # fmt: skip


def _verl(report: Report, cases: dict[str, Row]) -> None:
    table: list[list[Any]] = []
    for gpus, (slow, fast) in VERL.items():
        found = [cases[f"{mode}/{gpus}"]["step_s"] for mode in ("synchronous", "asynchronous")]
        table.append(
            [
                gpus,
                f"{slow:.0f}, {found[0]:.0f}",
                f"{fast:.0f}, {found[1]:.0f}",
                f"{slow / fast:.2f}, {found[0] / found[1]:.2f}",
            ]
        )
    columns = ["GPUs", "seconds per step, synchronous: published, simulated"]
    columns += ["asynchronous: published, simulated", "speed-up: published, simulated"]
    report.table("verl", columns, table)


def _areal(report: Report, cases: dict[str, Row]) -> None:
    steps = {mode: cases[mode]["step_s"] for mode in AREAL}
    told = {mode: 3.6 * hours for mode, hours in AREAL.items()}
    table: list[Sequence[Any]] = [(mode, told[mode], steps[mode]) for mode in AREAL]
    up = [one["synchronous"] / one["asynchronous"] for one in (told, steps)]
    table.append(("speed-up", *(f"{value:.2f}" for value in up)))
    report.table("areal", ["", "seconds per step: published", "simulated"], table)


def _apr(report: Report, cases: dict[str, Row]) -> None:
    whole, part = cases["synchronous"], cases["partials, generation alone"]
    training = whole["step_s"] * whole["trainer"]["train"]
    switches = whole["step_s"] * whole["trainer"]["switch"]
    now = part["step_s"] + training + switches
    report.figure("apr_step_s", whole["step_s"])
    report.figure("apr_training_s", training)
    report.figure("apr_generation_s", part["step_s"])
    report.figure("apr_partial_step_s", now)
    report.figure("apr_less", 1 - now / whole["step_s"])
    report.figure("apr_less_published", 1 - APR_HOURS[1] / APR_HOURS[0])


STUDIES = {
    "generators": _generators,
    "modes": _modes,
    "splits": _splits,
    "failures": _failures,
    "verl": _verl,
    "areal": _areal,
    "apr": _apr,
}
