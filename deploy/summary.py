"""A run's outcome in one object: from its metrics, the buffer's last status and what it used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from umbra.deploy.overlap import Interval, overlap
from umbra.deploy.process import Usage
from umbra.deploy.report.recording import Recording
from umbra.deploy.run_folder import RunFolder
from umbra.services.runtime.disk import DISK, READABLE_MODE


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the supervisor knows about the end of a run."""

    exit_reason: str
    exit_code: int
    total_s: float
    usage: Mapping[str, Usage] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)  # evals: accuracy, greedy
    after: Mapping[str, float] = field(default_factory=dict)


def summarise(folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """The summary of the run in `folder`; what is not known is None."""
    measured = measure(Recording([folder.path]).aligned_rows() if folder.metrics.exists() else [])
    status = read_status(folder)
    ledger = status.get("ledger")
    if ledger is not None:
        ended, flight = sum(ledger["ended"].values()), sum(ledger["in_flight"].values())
        ledger = {**ledger, "balance": ledger["issued"] - ledger["trained"] - ended - flight}
    return {
        "run_id": folder.id,
        "exit_reason": outcome.exit_reason,
        "exit_code": outcome.exit_code,
        "accuracy_before": outcome.before.get("accuracy"),
        "accuracy_after": outcome.after.get("accuracy"),
        "greedy_before": outcome.before.get("greedy"),
        "greedy_after": outcome.after.get("greedy"),
        **measured,
        "staleness": status.get("staleness"),
        "ledger": ledger,
        "evals": [
            {key: report[key] for key in ("version", "accuracy", "answered", "samples", "scores")}
            for report in status.get("evals", [])
        ],
        "seconds": {
            "total": outcome.total_s,
            "services": {
                name: {"wall": used.wall_s, "cpu": used.cpu_s}
                for name, used in outcome.usage.items()
            },
        },
        "restarts": dict(outcome.restarts),
        "model": str(folder.model) if (folder.model / "config.json").exists() else None,
    }


def measure(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows of metrics.jsonl say about the run as a whole.

    Rates are over the steady state, as in `overlap`: from the start of the second train step to the
    end of the last one.
    """
    steps: list[Mapping[str, Any]] = []
    trains: list[Interval] = []
    decodes: list[Interval] = []
    pushes: list[Mapping[str, Any]] = []
    for row in rows:
        match row["kind"]:
            case "step":
                steps.append(row)
            case "push":
                pushes.append(row)
            case "span" if row["name"] == "train_step":
                trains.append((row["start"], row["end"]))
            case "span" if row["name"] == "decode":
                decodes.append((row["start"], row["end"]))
            case _:
                pass
    together = overlap(trains, decodes)
    window_s = together.window_s if together else 0.0
    # A trainer that started again has repeated some: only the last of each counts.
    steps = list({row["step"]: row for row in steps}.values())
    k3 = [row.get("mismatch/k3_on_policy") for row in steps]
    return {
        "steps": len(steps),
        "samples": int(sum(row.get("samples") or 0 for row in steps)),
        "pushes": len(pushes),
        "push_seconds": _push_seconds(pushes),
        "mixed_version_trajectories": round(
            sum((row.get("multi_version") or 0.0) * (row.get("samples") or 0) for row in steps)
        ),
        "overlap": asdict(together) if together else None,
        "mismatch_k3_on_policy": max((value for value in k3 if value is not None), default=None),
        "tokens_per_s": _rate(steps[1:], "tokens", window_s),
        "samples_per_s": _rate(steps[1:], "samples", window_s),
    }


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write summary.json."""
    text = json.dumps(summary, indent=2) + "\n"
    DISK.replace(folder.summary, text.encode(), mode=READABLE_MODE)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary for people: name and value, the unknown left out."""
    rows = [("run", summary["run_id"]), ("ended", summary["exit_reason"])]
    for name in ("accuracy", "greedy"):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        if before is not None or after is not None:
            rows.append((name, f"{_share(before)} -> {_share(after)}"))
    if evals := summary["evals"]:
        shown = ", ".join(f"{one['version']}: {_share(one['accuracy'])}" for one in evals)
        rows.append(("accuracy by version", shown))
    rows.append(("steps", f"{summary['steps']} ({summary['samples']} samples)"))
    if staleness := summary["staleness"]:
        rows.append(
            (
                "staleness",
                f"mean {staleness.get('mean', 0):.2f}, max {staleness.get('max', 0):g}, "
                f"bound {staleness.get('bound', 0):g}",
            )
        )
    if (k3 := summary["mismatch_k3_on_policy"]) is not None:
        rows.append(("logprobs", f"generator and trainer agree to k3 = {k3:.2g} on equal weights"))
    if seconds := summary["push_seconds"]:
        phases = ", ".join(f"{phase} {1000 * spent:.1f}" for phase, spent in seconds.items())
        rows.append(("pushes", f"{summary['pushes']}; median ms: {phases}"))
    if ledger := summary["ledger"]:
        ended = ", ".join(f"{count} {reason}" for reason, count in ledger["ended"].items() if count)
        balance = "balanced" if not ledger["balance"] else f"OFF BY {ledger['balance']}"
        rows.append(
            (
                "ledger",
                f"{ledger['issued']} issued = {ledger['trained']} trained"
                + (f" + {ended}" if ended else "")
                + f", {balance}"
                + (f"; replayed {ledger['replayed']} times" if ledger.get("replayed") else ""),
            )
        )
    if both := summary["overlap"]:
        rows.append(
            (
                "busy",
                f"generation {both['generator_busy']:.0%}, training {both['trainer_busy']:.0%}, "
                f"both at once {both['both_busy']:.0%}",
            )
        )
    if summary["samples_per_s"] is not None:
        rows.append(
            (
                "speed",
                f"{summary['samples_per_s']:.0f} samples/s, {summary['tokens_per_s']:.0f} tokens/s",
            )
        )
    if summary["restarts"]:
        rows.append(("restarts", ", ".join(f"{n} {c}" for n, c in summary["restarts"].items())))
    rows.append(("seconds", f"{summary['seconds']['total']:.1f}"))
    if summary["model"]:
        rows.append(("model", summary["model"]))
    return rows


def read_status(folder: RunFolder) -> dict[str, Any]:
    """The last status of the buffer; empty if it left none."""
    try:
        return json.loads(folder.buffer.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}  # the buffer was killed before it could write it


def _push_seconds(pushes: list[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase of a push."""
    if not pushes:
        return {}
    return {
        phase: median(row.get(f"{phase}_s", 0.0) for row in pushes)
        for phase in ("snapshot", "wire", "stage", "commit", "total")
    }


def _rate(steps: Iterable[Mapping[str, Any]], key: str, window_s: float) -> float | None:
    return sum(row.get(key) or 0 for row in steps) / window_s if window_s else None


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
