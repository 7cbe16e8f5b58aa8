"""`umbra report`: a run as report.html, the page of `umbra monitor --web`, and as trace.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from umbra.deploy import run_folder
from umbra.deploy.report import summary as summaries
from umbra.deploy.report.summary import Figures, recorded
from umbra.deploy.run_folder import Row, RunFolder
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.monitor.view import page_file
from umbra.services.process.files import named_run
from umbra.services.reporting import busy, is_idle

COLUMNS = (
    "reward/mean", "solved", "samples_per_s", "loss", "response_length/mean", "response_length/p99",
    "staleness/total/mean", "staleness/total/max", "entropy", "grad_norm", "mismatch/k3", "ess",
    "train_tokens_per_s", "truncated", "seconds/wait_batch", "seconds/train_step",
)  # fmt: skip
"""Metrics of steps that the page draws, by their names in metrics.jsonl."""
ROLLOUT_STEPS = 12  # whose rollouts are shown, from the first step to the last
POINTS, PUSHES = 400, 2_000  # of a line at most, of which more are thinned out by means; the newest
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


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


def recorded_look(
    run_id: str,
    figures: Figures,
    *,
    summary: Mapping[str, Any],
    facts: Sequence[tuple[str, str]],
    status: Mapping[str, Any],
    config: Mapping[str, Any],
    rollouts: Sequence[Row],
) -> dict[str, Any]:
    """Return the page's data, in the form of a live run's (`look_dict`).

    `summary` is empty while the run is under way; `status`, the buffer's last, and `config` may be.
    """
    steps = figures.steps
    size = max(1, math.ceil(len(steps) / POINTS))
    thinned = [steps[i : i + size] for i in range(0, len(steps), size)]
    return {
        "recorded": True,
        "run_id": run_id,
        "state": summary.get("exit_reason", "not ended"),
        "uptime_s": (summary.get("seconds") or {}).get("total", 0.0),
        "version": steps[-1]["step"] if steps else 0,
        "steps": (config.get("run") or {}).get("steps", len(steps)),
        "facts": facts,
        "curves": {
            "steps": [group[-1]["step"] for group in thinned],
            "values": {name: [_mean(group, name) for group in thinned] for name in COLUMNS},
        },
        "ledger": summaries.balanced(status.get("ledger")),
        "staleness_counts": status.get("staleness_counts", []),
        "counters": status.get("counters", {}),
        "evals": [{"scores": report, **report} for report in figures.evals],
        "departed": {},
        "members": [_member(name, seconds) for name, seconds in sorted(figures.seconds.items())],
        "pushes": figures.pushes[-PUSHES:],
        "rollouts": rollouts,
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
    steps = sorted({row["step"] for row in run_folder.read_rollouts(folder)})
    last = len(steps) - 1
    sample_steps = {steps[i * last // (ROLLOUT_STEPS - 1)] for i in range(ROLLOUT_STEPS) if steps}
    return [row for row in run_folder.read_rollouts(folder) if row["step"] in sample_steps]


def _mean(steps: Sequence[Row], name: str) -> float | None:
    values = [float(row[name]) for row in steps if row.get(name) is not None]
    return sum(values) / len(values) if values else None


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--also", "others", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder of the same run from another node; may be given several times.",
)  # fmt: skip
def command(run: Path, others: tuple[Path, ...]) -> int:
    """Write RUN/report.html, a page that needs nothing else, and RUN/trace.json for Perfetto.

    RUN is the folder of a run, or its id in runs/; it may still be going on.
    """
    folder = named_run(run)
    if not folder.is_dir():
        raise UsageError(f"{run} is no run: neither it nor runs/{run} is a folder")
    with run_folder.only_rows_of_runs(folder):
        for path in write_report(RunFolder(folder), others):
            click.echo(str(path))
    return EXIT_DONE


def write_report(folder: RunFolder, others: Sequence[Path] = ()) -> list[Path]:
    """Write the page and the timeline of a run, and return where; UsageError if it is none."""
    folders, trace = [folder.path, *others], folder.path / "trace.json"
    summaries.write_trace(recorded(folders), trace)
    summary = run_folder.read_object(folder.summary, remedy := "restore it, or remove it")
    config = run_folder.read_object(folder.config, remedy)
    figures = summaries.gather(recorded(folders))
    warnings = [("warning", f"{row['name']}: {row['text']}") for row in figures.warnings]
    look = recorded_look(
        folder.path.resolve().name,
        figures,
        summary=summary,
        facts=summaries.summary_rows(summary) if summary else warnings,
        status=run_folder.read_object(folder.buffer),
        config=config,
        rollouts=_rollouts(folder),
    )
    with run_folder.rewritten(folder.report) as file:
        file.write(page(look))
    return [folder.report, trace]
