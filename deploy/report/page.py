"""A run as one HTML page that needs nothing else: no scripts, no fonts, nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from statistics import median, quantiles
from typing import Any

from umbra.deploy.files.rollouts import Rollout, heading, pieces
from umbra.deploy.report.recording import Figures
from umbra.deploy.report.svg import bar_chart, line_chart
from umbra.services.prompts.download import shown
from umbra.services.reporting.figures import PHASES, busy, idle_causes, is_idle
from umbra.services.reporting.tables import number

OLD = 4  # steps of staleness, from which on all looks the same
CHARTS: dict[str, tuple[tuple[str, str], ...]] = {  # title -> (label, column) of each line
    "reward": (("mean", "reward/mean"), ("solved", "solved")),
    "loss": (("loss", "loss"),),
    "entropy": (("entropy", "entropy"),),
    "gradient norm": (("norm", "grad_norm"),),
    "staleness of a batch, steps": (
        ("mean", "staleness/total/mean"),
        ("max", "staleness/total/max"),
    ),
    "mismatch k3": (("k3", "mismatch/k3"),),
    "effective share of samples": (("ess", "ess"),),
    "response length, tokens": (
        ("mean", "response_length/mean"),
        ("p99", "response_length/p99"),
    ),
    "tokens/s while training": (("tokens/s", "train_tokens_per_s"),),
    "share of answers cut off": (("truncated", "truncated"),),
    "seconds of a step": (
        ("wait for batch", "seconds/wait_batch"),
        ("train", "seconds/train_step"),
    ),
}


def page(
    title: str,
    figures: Figures,
    *,
    facts: Sequence[tuple[str, str]],
    status: Mapping[str, Any],
    config: Mapping[str, Any],
    rollouts: Sequence[Rollout] = (),
) -> str:
    """The report.

    Args:
        title: the run's id.
        facts: name and value of what is said first.
        status: the last one of the buffer; may be empty.
        config: the resolved configuration; may be empty.
        rollouts: to read.
    """
    style = files("umbra.deploy.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "".join(
        (
            f"<h1>{escape(title)}</h1>",
            _facts(facts),
            _section("Curves", f'<div class="charts">{"".join(_curves(figures))}</div>'),
            _section("Samples", _ledger(status)),
            _section("Where the time went", _utilisation(figures)),
            _section("Weight pushes", _pushes(figures)),
            _section("Rollouts of the last steps", _rollouts(rollouts)),
            _section("Configuration", _config(config)),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; numbers are aligned to the right."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _section(title: str, inner: str) -> str:
    return f"<h2>{escape(title)}</h2>{inner}" if inner.strip() else ""


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="n">{number(value, digits=4)}</td>'
    return f"<td>{escape(str(value))}</td>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(v))}</td></tr>" for name, v in facts
    )
    return f"<table>{rows}</table>"


def _curves(figures: Figures) -> Iterator[str]:
    for title, columns in CHARTS.items():
        lines = {
            label: [
                (float(row["step"]), float(row[column]))
                for row in figures.steps
                if row.get(column) is not None
            ]
            for label, column in columns
        }
        yield line_chart(lines, title=title)
    yield line_chart(_accuracy(figures), title="accuracy on held-out prompts, by version")


def _accuracy(figures: Figures) -> dict[str, list[tuple[float, float]]]:
    """Return mean reward and pass@k for k > 1, as far as they were measured."""
    names = {name for row in figures.evals for name in row if name.startswith("pass@")}
    several = sorted(names - {"pass@1"}, key=lambda name: int(name.removeprefix("pass@")))
    return {
        name: [(float(row["version"]), float(row[name])) for row in figures.evals if name in row]
        for name in ("accuracy", *several)
    }


def _ledger(status: Mapping[str, Any]) -> str:
    ledger = status.get("ledger")
    if not ledger:
        return ""
    parts = {"trained": ledger["trained"], **ledger["ended"], **ledger["in_flight"]}
    parts = {name: count for name, count in parts.items() if count}
    total = max(1, sum(parts.values()))
    bars = "".join(
        f'<span class="b{index % 8}" style="flex:{count / total:.4f}"></span>'
        for index, count in enumerate(parts.values())
    )
    keys = "  ".join(
        f'<span class="swatch b{index % 8}"></span>{count:,} {escape(name)} &nbsp;'
        for index, (name, count) in enumerate(parts.items())
    )
    off = ledger["issued"] - sum(parts.values())
    verdict = f'<span class="bad">off by {off:,}</span>' if off else "balanced"
    counters = {name: count for name, count in status.get("counters", {}).items() if count}
    chart = bar_chart(status.get("staleness_counts", []), title="staleness of trained samples")
    return (
        f'<div class="bar">{bars}</div><p>{ledger["issued"]:,} issued: {keys} {verdict}</p>'
        f'<div class="charts">{chart}<div>{table(("counted", ""), counters.items())}</div></div>'
    )


def _utilisation(figures: Figures) -> str:
    rows: list[tuple[object, ...]] = []
    for service, seconds in sorted(figures.seconds.items()):
        work = {name: spent for name, spent in seconds.items() if not is_idle(name)}
        rows.append(
            (
                service,
                f"{busy(seconds):.0%}",
                f"{sum(seconds.values()):.1f} s",
                ", ".join(f"{n} {s:.1f} s" for n, s in sorted(work.items(), key=lambda i: -i[1])),
                ", ".join(f"{cause} {share:.0%}" for cause, share in idle_causes(seconds).items()),
            )
        )
    columns = ("service", "busy", "of", "with", "idle for want of")
    hint = (
        '<p class="dim">The timeline of all services is in <code>trace.json</code>: open it at '
        "ui.perfetto.dev.</p>"
    )
    return table(columns, rows) + hint if rows else ""


def _pushes(figures: Figures) -> str:
    rows: list[tuple[object, ...]] = []
    for receiver, pushes in sorted(figures.pushes.items()):
        for phase in PHASES:
            spent = [1e3 * float(push.get(f"{phase}_s", 0.0)) for push in pushes]
            p95 = quantiles(spent, n=20)[-1] if len(spent) > 1 else spent[0]
            rows.append((receiver, len(pushes), phase, median(spent), p95, max(spent)))
    if not rows:
        return ""
    chart = line_chart(
        {
            receiver: [(float(p["version"]), 1e3 * float(p["total_s"])) for p in pushes]
            for receiver, pushes in list(sorted(figures.pushes.items()))[:8]
        },
        title="milliseconds from the snapshot to the commit, by version",
    )
    columns = ("receiver", "pushes", "phase", "median ms", "p95 ms", "max ms")
    return f'<div class="charts">{chart}<div>{table(columns, rows)}</div></div>'


def _rollouts(rollouts: Sequence[Rollout]) -> str:
    if not rollouts:
        return ""
    ages = ", ".join(f'<span class="age{n}">{n}</span>' for n in range(1, OLD))
    told = (
        f'<p class="dim">Underlined: said by weights that were {ages}, '
        f'<span class="age{OLD}">{OLD} or more</span> steps old when it was trained on; pale: '
        "prompt and environment.</p>"
    )
    return told + "".join(map(_rollout, rollouts))


def _rollout(rollout: Rollout) -> str:
    said = "".join(
        f'<span class="{"dim" if age is None else f"age{min(age, OLD)}"}">{escape(text)}</span>'
        for text, _, age in pieces(rollout)
    )
    prompt = f'<span class="dim">{escape(rollout["prompt"])}</span>'
    return f"<div>{escape(heading(rollout))}</div><pre>{prompt}{said}</pre>"


def _config(config: Mapping[str, Any]) -> str:
    return "".join(
        f"<details><summary>{escape(section)}</summary>"
        f"{table(('key', 'value'), [(k, _value(v)) for k, v in values.items()])}</details>"
        for section, values in config.items()
        if isinstance(values, dict) and values
    )


def _value(value: Any) -> str:
    return shown(value if isinstance(value, str) else json.dumps(value))
