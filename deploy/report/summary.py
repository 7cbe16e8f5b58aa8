"""A run's outcome in one object: from its metrics, the buffer's last status and what it used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.report.recording import Recording
from umbra.proto.errors import UNREADABLE
from umbra.services.monitor.view import health_text
from umbra.services.process.child import Usage
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.reporting.figures import PHASES, is_idle
from umbra.services.reporting.tables import counts, number

Interval = tuple[float, float]  # start and end, seconds
JOIN_S = 0.001  # spans that are closer are one


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The supervisor's view of the end of a run."""

    exit_reason: str
    exit_code: int
    total_s: float
    usage: Mapping[str, Usage] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)  # evals: accuracy, greedy
    after: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, Any] = field(default_factory=dict)  # the last status that the buffer told


def summarise(folder: RunFolder, outcome: RunOutcome) -> dict[str, Any]:
    """Return the summary of the run in `folder`; unknown values are None."""
    measured = measure(Recording([folder.path]).rows() if folder.metrics.exists() else [])
    status = read_status(folder)
    ledger = status.get("ledger")
    last_seen = ledger is None and "ledger" in outcome.seen
    if last_seen:
        ledger = outcome.seen["ledger"]
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
        "health": status.get("health"),
        "warnings": status.get("warnings", []),
        "ledger": ledger,
        "ledger_last_seen": last_seen,  # the buffer was killed: samples went on after this
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

    Rates and shares are over the time from the first decoding to the end of the last train step, in
    which all of the samples were made and trained; so they hold for a run of one step, too.
    """
    steps: list[Mapping[str, Any]] = []
    pushes: list[Mapping[str, Any]] = []
    times = _Times()
    for row in rows:
        match row["kind"]:
            case "step":
                steps.append(row)
            case "push":
                pushes.append(row)
            case "span":
                times.add(row)
            case _:
                pass
    together = times.overlap()
    window_s = together.window_s if together else 0.0
    # A trainer that started again has repeated some: only the last of each counts.
    steps = list({row["step"]: row for row in steps}.values())
    k3 = [row.get("mismatch/k3_on_policy") for row in steps]
    samples = sum(row.get("samples") or 0 for row in steps)
    tokens = sum(
        (row.get("samples") or 0) * (row.get("response_length/mean") or 0) for row in steps
    )
    return {
        "steps": len(steps),
        "samples": int(samples),
        "pushes": len(pushes),
        "push_seconds": _push_seconds(pushes),
        "mixed_version_trajectories": round(
            sum((row.get("multi_version") or 0.0) * (row.get("samples") or 0) for row in steps)
        ),
        "overlap": asdict(together) if together else None,
        "mismatch_k3_on_policy": max((value for value in k3 if value is not None), default=None),
        "mismatch_compared": int(sum(row.get("mismatch/compared") or 0 for row in steps)),
        "outlier_tokens": int(sum(row.get("outliers") or 0 for row in steps)),
        "tokens_per_s": tokens / window_s if window_s else None,
        "samples_per_s": samples / window_s if window_s else None,
    }


class _Times:
    """Busy and idle times by service; contiguous spans are merged, so they stay few."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, bool], list[Interval]] = {}  # by service, and whether busy
        self._names: dict[str, set[str]] = {}  # of the spans of each service
        self._first_decode = math.inf
        self._last_train = -math.inf

    def add(self, row: Mapping[str, Any]) -> None:
        service, name, start, end = row["service"], row["name"], row["start"], row["end"]
        self._names.setdefault(service, set()).add(name)
        spans = self._spans.setdefault((service, not is_idle(name)), [])
        if spans and 0 <= start - spans[-1][1] < JOIN_S:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        if name == "decode":
            self._first_decode = min(self._first_decode, start)
        elif name == "train_step":
            self._last_train = max(self._last_train, end)

    def overlap(self) -> Overlap | None:
        """Of generation and training; None if not both were there."""
        window = (self._first_decode, self._last_train)
        if not window[0] < window[1] < math.inf:
            return None
        running = [span for spans in self._spans.values() for span in spans]
        return overlap(self._busy("train_step"), self._busy("decode"), running, window)

    def _busy(self, doing: str) -> list[Interval]:
        """Return when the services that ever do `doing` were not idle."""
        services = [service for service, names in self._names.items() if doing in names]
        return [span for service in services for span in self._spans.get((service, True), ())]


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    DISK.replace(folder.summary, text.encode(), mode=READABLE_MODE)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as names and values for people, the unknown left out."""
    rows: list[tuple[str, str]] = []

    def add(name: str, *texts: str) -> None:
        rows.append((name, "".join(texts)))

    add("run", summary["run_id"])
    add("ended", summary["exit_reason"])
    for name in ("accuracy", "greedy"):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        if before is not None or after is not None:
            add(name, f"{_share(before)} -> {_share(after)}")
    if evals := summary["evals"]:
        shown = ", ".join(f"{one['version']}: {_share(one['accuracy'])}" for one in evals)
        add("accuracy by version", shown)
    add("steps", f"{summary['steps']} ({summary['samples']} samples)")
    if stale := summary["staleness"]:
        mean, most, bound = (stale.get(name, 0) for name in ("mean", "max", "bound"))
        add("staleness", f"mean {mean:.2f}, max {most:g}, bound {bound:g}")
    if (k3 := summary["mismatch_k3_on_policy"]) is not None:
        add("logprobs", f"generator and trainer agree to k3 = {k3:.2g} on equal weights")
    if compared := summary["mismatch_compared"]:
        add("compared", f"{compared} tokens of generators with the trainer's")
    elif summary["steps"]:
        add("compared", "NOTHING: no token was sampled by weights that the trainer had")
    if outliers := summary["outlier_tokens"]:
        add("outliers", f"{outliers} tokens left out (improbable beyond 10,000 times)")
    if seconds := summary["push_seconds"]:
        phases = ", ".join(f"{phase} {1000 * spent:.1f}" for phase, spent in seconds.items())
        add("pushes", f"{summary['pushes']}; median ms: {phases}")
    if ledger := summary["ledger"]:
        parts = [f"{ledger['trained']} trained", counts(ledger["ended"])]
        sums = " + ".join(part for part in (*parts, counts(ledger["in_flight"])) if part)
        balance = "balanced" if not ledger["balance"] else f"OFF BY {ledger['balance']}"
        when = " when last asked" if summary.get("ledger_last_seen") else ""
        add("ledger", f"{ledger['issued']} issued = {sums}, {balance}{when}")
    if health := summary["health"]:
        add("health", health_text(health, "/run"))
    rows += [("warning", warning_text(one)) for one in summary["warnings"]]
    if both := summary["overlap"]:
        add(
            "busy",
            f"generation {both['generator_busy']:.0%}, training {both['trainer_busy']:.0%}, ",
            f"both at once {both['both_busy']:.0%}",
        )
    if (rate := summary["samples_per_s"]) is not None:
        add("speed", f"{number(rate)} samples/s, {number(summary['tokens_per_s'])} tokens/s")
    if summary["restarts"]:
        add("restarts", ", ".join(f"{name} {count}" for name, count in summary["restarts"].items()))
    add("seconds", f"{summary['seconds']['total']:.1f}")
    if summary["model"]:
        add("model", summary["model"])
    return rows


def warning_text(warning: Mapping[str, Any]) -> str:
    """Return a warning of a run that has ended: its steps, and its last sentence."""
    until = "the end" if warning["until"] < 0 else f"step {warning['until']}"
    return f"{warning['name']}, from step {warning['since']} to {until}: {warning['text']}"


def warning_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the warnings of a run under way, as they were first raised."""
    return [("warning", f"{row['name']}: {row['text']}") for row in rows]


def read_status(folder: RunFolder) -> dict[str, Any]:
    try:
        status = json.loads(folder.buffer.read_bytes())
    except (FileNotFoundError, *UNREADABLE):
        return {}  # the buffer was killed before it could write it, or the file was spoiled since
    return status if isinstance(status, dict) else {}


def _push_seconds(pushes: list[Mapping[str, Any]]) -> dict[str, float]:
    if not pushes:
        return {}
    return {phase: median(row.get(f"{phase}_s", 0.0) for row in pushes) for phase in PHASES}


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of the window in which each side, and both at once, were busy."""

    generator_busy: float
    trainer_busy: float
    both_busy: float
    window_s: float


def overlap(
    training: Iterable[Interval],
    generation: Iterable[Interval],
    running: Iterable[Interval],
    window: Interval,
) -> Overlap | None:
    """How busy both sides were in `window`, without the time in which nothing ran.

    Several generators count once: a side is busy while any of its processes is.

    Args:
        training, generation: when the sides did anything but wait.
        running: when any process of the run did anything at all, waiting included. A run that was
            ended and taken up again has a gap in it, which does not count.
        window: from where to where.

    Returns:
        None for a window in which nothing ran.
    """
    # Of generation, training and the run: how many processes are at it, and since when.
    edges = [
        (moment, index, step)
        for index, intervals in enumerate((generation, training, running))
        for start, end in intervals
        if min(end, window[1]) > max(start, window[0])
        for moment, step in ((max(start, window[0]), 1), (min(end, window[1]), -1))
    ]
    at_work, seconds, since = [0, 0, 0], [0.0, 0.0, 0.0, 0.0], 0.0
    for moment, index, step in sorted(edges):
        busy = [count > 0 for count in at_work]
        for which, passes in enumerate((*busy, busy[0] and busy[1])):
            seconds[which] += (moment - since) * passes
        at_work[index] += step
        since = moment
    generator, trainer, window_s, both = seconds
    if window_s <= 0:
        return None
    return Overlap(generator / window_s, trainer / window_s, both / window_s, window_s)
