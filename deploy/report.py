"""Records of a run: its rows as figures, its outcome in one object, its page and its timeline.

`umbra report` writes report.html, the page of `umbra monitor --web`, and trace.json. Times are by
the clock of each service's machine.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from umbra.deploy.run_folder import (
    Row,
    RunFolder,
    only_rows_of_runs,
    read_object,
    read_rollouts,
    read_rows,
    rewritten,
)
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.monitor.view import health_text, page_file
from umbra.services.process.child import Usage
from umbra.services.process.files import DISK, READABLE_MODE, named_run
from umbra.services.process.metrics import JOIN_S, span_name
from umbra.services.reporting import PHASES, busy, counts, is_idle, number

Interval = tuple[float, float]  # start and end, seconds
EVENT_FIELDS = ("time", "service", "kind", "name", "start", "end")  # of a row, by the event itself
COLUMNS = (
    "reward/mean", "solved", "samples_per_s", "loss", "response_length/mean", "response_length/p99",
    "staleness/total/mean", "staleness/total/max", "entropy", "grad_norm", "mismatch/k3", "ess",
    "train_tokens_per_s", "truncated", "seconds/wait_batch", "seconds/train_step",
)  # fmt: skip
"""Metrics of steps that the page draws, by their names in metrics.jsonl."""
ROLLOUT_STEPS = 12  # whose rollouts are shown, from the first step to the last
POINTS, PUSHES = 400, 2_000  # of a line at most, of which more are thinned out by means; the newest
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def _span(row: Row) -> tuple[str, float, float, str] | None:
    """Return name, start, end and track of the span in `row`; None if it has none."""
    end = row.get("time", 0.0)
    match row["kind"]:
        case "span":
            return span_name(row), row["start"], row["end"], "main"
        case "push":
            begin, to = end - row["total_s"], f"to {row['receiver']}"
            return f"push {row['version']}", begin, end, to
        case "eval":
            return f"eval of version {row['version']}", end - row["seconds"], end, "evals"
        case _:
            return None


class Figures:
    """The figures of the rows of a run; of a step that a trainer has repeated the last one counts.

    `seconds` are by service and activity, `spans` by service and whether it was busy; contiguous
    ones are merged, so they stay few. `warnings` are as they were first raised.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.pushes, self.evals, self.warnings = list[Row](), list[Row](), list[Row]()
        self.seconds: dict[str, dict[str, float]] = {}
        self.spans: dict[tuple[str, bool], list[Interval]] = defaultdict(list)
        self.first_decode, self.last_train = math.inf, -math.inf
        steps: dict[int, Row] = {}
        lists = {"push": self.pushes, "eval": self.evals, "warning": self.warnings}
        for row in rows:
            if (kind := row["kind"]) == "step":
                steps[row["step"]] = row
            elif kind == "span":
                self._add_span(row)
            elif kind in lists:
                lists[kind].append(row)
        self.steps = [steps[number] for number in sorted(steps)]

    def busy(self, doing: str) -> list[Interval]:
        """Return when the services that ever do `doing` were not idle."""
        return [
            span
            for service, seconds in self.seconds.items()
            if any(name.partition(": ")[0] == doing for name in seconds)
            for span in self.spans.get((service, True), ())
        ]

    def _add_span(self, row: Row) -> None:
        service, name, start, end = row["service"], row["name"], row["start"], row["end"]
        seconds, activity = self.seconds.setdefault(service, {}), span_name(row)
        seconds[activity] = seconds.get(activity, 0.0) + max(0.0, end - start)
        spans = self.spans[service, not is_idle(name)]
        if spans and 0 <= start - spans[-1][1] < JOIN_S:
            start = spans.pop()[0]
        spans.append((start, end))
        if name == "decode":
            self.first_decode = min(self.first_decode, row["start"])
        elif name == "train_step":
            self.last_train = max(self.last_train, end)


def write_trace(rows: Iterable[Row], path: Path) -> None:
    """Write the spans in Chromium's Trace Event Format (microseconds)."""
    separator = ""
    with rewritten(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in _events(rows):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    numbers: dict[str, dict[str, int]] = {}  # of the tracks of each service, from 1
    for row in rows:
        if row["kind"] == "batch":  # samples by state when it was formed
            args, at = row["in_flight"], round(1e6 * row["time"], 1)
            yield {"ph": "C", "name": "samples in flight", "ts": at, "pid": 0, "args": args}
        if (span := _span(row)) is None:
            continue
        (name, start, end, track), service = span, row["service"]
        if service not in numbers:
            numbers[service] = {}
            yield _name_event("process", len(numbers), 0, service)
        tracks, process = numbers[service], list(numbers).index(service) + 1
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            yield _name_event("thread", process, tracks[track], track)
        yield {
            "ph": "X",
            "name": name,
            "cat": service,
            "ts": round(1e6 * start, 1),
            "dur": round(1e6 * max(0.0, end - start), 1),
            "pid": process,
            "tid": tracks[track],
            "args": {k: v for k, v in row.items() if k not in EVENT_FIELDS},
        }


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    place = {"pid": process, "tid": thread}
    return {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}


def summarise(
    folder: RunFolder,
    exit_reason: str,
    exit_code: int,
    total_s: float,
    *,
    usage: Mapping[str, Usage] = {},
    restarts: Mapping[str, int] = {},
) -> dict[str, Any]:
    """Return the summary of the run in `folder`; unknown values are None."""
    figures = Figures(read_rows(folder.metrics))
    accuracy = {row["version"]: row["accuracy"] for row in figures.evals}
    steps = (read_object(folder.config).get("run") or {}).get("steps")
    status = read_object(folder.buffer)  # empty if the buffer was killed before it could write it
    scored = ("version", "accuracy", "answered", "samples", "scores")
    return {
        "run_id": folder.id,
        "exit_reason": exit_reason,
        "exit_code": exit_code,
        "accuracy_before": accuracy.get(0),
        "accuracy_after": accuracy.get(steps),
        **measure(figures),
        "staleness": status.get("staleness"),
        "health": status.get("health"),
        "warnings": status.get("warnings", []),
        "ledger": balanced(status.get("ledger")),
        "evals": [{key: report[key] for key in scored} for report in status.get("evals", [])],
        "seconds": {
            "total": total_s,
            "services": {name: {"wall": u.wall_s, "cpu": u.cpu_s} for name, u in usage.items()},
        },
        "restarts": dict(restarts),
        "model": str(folder.model) if (folder.model / "config.json").exists() else None,
    }


def balanced(ledger: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a ledger with its `balance`, which is 0 unless a sample was lost."""
    if not ledger:
        return None
    samples = ledger["trained"], *ledger["ended"].values(), *ledger["in_flight"].values()
    return {**ledger, "balance": ledger["issued"] - sum(samples)}


def measure(figures: Figures) -> dict[str, Any]:
    """Return the figures of the run as a whole.

    Rates and shares are over the time from the first decoding to the end of the last train step, in
    which all of the samples were made and trained; so they hold for a run of one step, too. Time
    for which training waited for an evaluation of the first weights does not count.
    """
    steps, pushes = figures.steps, figures.pushes
    first = [row["time"] for row in figures.evals if row["version"] == 0]
    before = [end for end in first if steps and end < steps[0].get("time", math.inf)]
    window = (max([figures.first_decode, *before]), figures.last_train)
    shares = None
    if window[0] < window[1] < math.inf:
        running = [span for spans in figures.spans.values() for span in spans]
        shares = overlap(figures.busy("train_step"), figures.busy("decode"), running, window)
    window_s = shares["window_s"] if shares else 0.0

    def total(name: str, by: str = "") -> float:
        return sum((row.get(name) or 0) * ((row.get(by) or 0) if by else 1) for row in steps)

    k3 = [value for row in steps if (value := row.get("mismatch/k3_on_policy")) is not None]
    medians = {
        phase: median(row.get(f"{phase}_s", 0.0) for row in pushes or [{}]) for phase in PHASES
    }
    samples, tokens = total("samples"), total("samples", by="response_length/mean")
    return {
        "steps": len(steps),
        "samples": int(samples),
        "pushes": len(pushes),
        "push_seconds": medians if pushes else {},
        "mixed_version_trajectories": round(total("multi_version", by="samples")),
        "overlap": shares,
        "mismatch_k3_on_policy": max(k3, default=None),
        "mismatch_compared": int(total("mismatch/compared")),
        "outlier_tokens": int(total("outliers")),
        "tokens_per_s": tokens / window_s if window_s else None,
        "samples_per_s": samples / window_s if window_s else None,
    }


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    DISK.replace(folder.summary, text.encode(), mode=READABLE_MODE)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as names and values for people, the unknown left out."""
    rows = [("run", summary["run_id"]), ("ended", summary["exit_reason"])]

    def add(name: str, text: str) -> None:
        rows.append((name, text))

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None or after is not None:
        add("accuracy", f"{_share(before)} -> {_share(after)}")
    add("steps", f"{summary['steps']} ({summary['samples']} samples)")
    if stale := summary["staleness"]:
        mean, largest, bound = (stale.get(name, 0) for name in ("mean", "max", "bound"))
        add("staleness", f"mean {mean:.2f}, max {largest:g}, bound {bound:g}")
    if (k3 := summary["mismatch_k3_on_policy"]) is not None:
        add("logprobs", f"generator and trainer agree to k3 = {k3:.2g} on equal weights")
    if compared := summary["mismatch_compared"]:
        add("compared", f"{compared} tokens, sampled by generators and scored by the trainer")
    elif summary["steps"]:
        add("compared", "NOTHING: no token was sampled by weights that the trainer had")
    if outliers := summary["outlier_tokens"]:
        add("outliers", f"{outliers} tokens left out: 10,000 times as probable as when sampled")
    if ledger := summary["ledger"]:
        parts = [f"{ledger['trained']} trained", counts(ledger["ended"])]
        sums = " + ".join(part for part in (*parts, counts(ledger["in_flight"])) if part)
        balance = "balanced" if not ledger["balance"] else f"OFF BY {ledger['balance']}"
        add("ledger", f"{ledger['issued']} issued = {sums}, {balance}")
    if health := summary["health"]:
        add("health", health_text(health))
    for report in summary["warnings"]:  # of a run that has ended
        until = "the end" if report["until"] < 0 else f"step {report['until']}"
        text = f"{report['name']}, from step {report['since']} to {until}: {report['text']}"
        add("warning", text)
    if shares := summary["overlap"]:
        sides = zip(("generation", "training", "both at once"), shares.values(), strict=False)
        add("busy", ", ".join(f"{side} {share:.0%}" for side, share in sides))
    if (rate := summary["samples_per_s"]) is not None:
        add("speed", f"{number(rate)} samples/s, {number(summary['tokens_per_s'])} tokens/s")
    if summary["restarts"]:
        add("restarts", ", ".join(f"{name} {count}" for name, count in summary["restarts"].items()))
    add("seconds", f"{summary['seconds']['total']:.1f}")
    if summary["model"]:
        add("model", summary["model"])
    return rows


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def overlap(
    training: Iterable[Interval],
    generation: Iterable[Interval],
    running: Iterable[Interval],
    window: Interval,
) -> dict[str, float] | None:
    """Return shares of `window` in which each side, and both, were busy; None if nothing ran.

    Several generators count once: a side is busy while any of its processes is. The time in which
    nothing was `running`, waiting included, does not count: a run that was ended and taken up again
    has such a gap.
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
        for column, passes in enumerate((*busy, busy[0] and busy[1])):
            seconds[column] += (moment - since) * passes
        at_work[index] += step
        since = moment
    *sides, window_s, both = seconds
    if window_s <= 0:
        return None
    names = ("generator_busy", "trainer_busy", "both_busy")
    shares = (side / window_s for side in (*sides, both))
    return {**dict(zip(names, shares, strict=True)), "window_s": window_s}


def page(look: Mapping[str, Any]) -> str:
    """Return the page, which needs nothing else: its scripts and its data are in itself."""
    html, style, script = (page_file(f"page.{kind}") for kind in ("html", "css", "js"))
    data = json.dumps(look, separators=(",", ":")).replace("<", "\\u003c")
    recorded = f'<script type="application/json" id="recorded">{data}</script>\n'
    for old, new in (
        ("<title>", f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>'),
        ('<link rel="stylesheet" href="page.css">', f"<style>\n{style}</style>"),
        ('<script src="page.js"></script>', f"{recorded}<script>\n{script}</script>"),
    ):
        html = html.replace(old, new, 1)
    return html


def recorded_look(folder: RunFolder, figures: Figures) -> dict[str, Any]:
    """Return the page's data, in the form of a live run's (`look_dict`)."""
    summary = read_object(folder.summary, remedy := "restore it, or remove it")  # empty: under way
    config, status = read_object(folder.config, remedy), read_object(folder.buffer)
    warnings = [("warning", f"{row['name']}: {row['text']}") for row in figures.warnings]
    steps = figures.steps
    size = max(1, math.ceil(len(steps) / POINTS))
    thinned = [steps[i : i + size] for i in range(0, len(steps), size)]
    return {
        "recorded": True,
        "run_id": folder.path.resolve().name,
        "state": summary.get("exit_reason", "not ended"),
        "uptime_s": (summary.get("seconds") or {}).get("total", 0.0),
        "version": steps[-1]["step"] if steps else 0,
        "steps": (config.get("run") or {}).get("steps", len(steps)),
        "facts": summary_rows(summary) if summary else warnings,
        "curves": {
            "steps": [group[-1]["step"] for group in thinned],
            "values": {name: [_mean(group, name) for group in thinned] for name in COLUMNS},
        },
        "ledger": balanced(status.get("ledger")),
        "staleness_counts": status.get("staleness_counts", []),
        "counters": status.get("counters", {}),
        "evals": [{"scores": report, **report} for report in figures.evals],
        "departed": {},
        "members": [_member(name, seconds) for name, seconds in sorted(figures.seconds.items())],
        "pushes": figures.pushes[-PUSHES:],
        "rollouts": _rollouts(folder),
        "config": {
            section: {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
            for section, values in config.items()
            if isinstance(values, dict) and values
        },
    }


def _member(name: str, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return a service with its activities and their shares of the whole time."""
    total = sum(seconds.values())
    work = sorted(((s, n) for n, s in seconds.items() if not is_idle(n)), reverse=True)
    return {
        "name": name,
        "role": "",
        "state": f"{total:.1f} s",
        "shares": {what: spent / total for what, spent in seconds.items()} if total else {},
        "busy": busy(seconds),
        "activity": ", ".join(f"{activity} {duration:.1f} s" for duration, activity in work),
    }


def _rollouts(folder: RunFolder) -> list[Row]:
    steps = sorted({row["step"] for row in read_rollouts(folder)})
    last = len(steps) - 1
    sample_steps = {steps[i * last // (ROLLOUT_STEPS - 1)] for i in range(ROLLOUT_STEPS) if steps}
    return [row for row in read_rollouts(folder) if row["step"] in sample_steps]


def _mean(steps: Sequence[Row], name: str) -> float | None:
    values = [float(row[name]) for row in steps if row.get(name) is not None]
    return sum(values) / len(values) if values else None


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> int:
    """Write RUN/report.html, a page that needs nothing else, and RUN/trace.json for Perfetto.

    RUN is the folder of a run, or its id in runs/; it may still be going on.
    """
    folder = named_run(run)
    if not folder.is_dir():
        raise UsageError(f"{run} is no run: neither it nor runs/{run} is a folder")
    with only_rows_of_runs(folder):
        for path in write_report(RunFolder(folder)):
            click.echo(str(path))
    return EXIT_DONE


def write_report(folder: RunFolder) -> list[Path]:
    """Write the page and the timeline of a run, and return where; UsageError if it is none."""
    if not folder.metrics.exists():
        raise UsageError(f"{folder.metrics} does not exist: name the folder of a run")
    trace = folder.path / "trace.json"
    write_trace(read_rows(folder.metrics), trace)
    look = recorded_look(folder, Figures(read_rows(folder.metrics)))
    with rewritten(folder.report) as file:
        file.write(page(look))
    return [folder.report, trace]
