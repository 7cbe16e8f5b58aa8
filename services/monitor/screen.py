"""The terminal view of `umbra monitor`: everything that is known of a run, on one screen."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from umbra.proto.messages import Status
from umbra.services.monitor.feed import Look, SampleSeen
from umbra.services.monitor.layout import Scroll, ScrolledWindow, beside
from umbra.services.monitor.view import (
    REFUSED_SHOWN,
    counters_text,
    eta_text,
    evals_text,
    health_text,
    ledger_text,
    member_table,
    notice_text,
    refused_texts,
    sparkline,
    staleness_text,
    stuck_text,
    warning_lines,
)
from umbra.services.reporting.figures import PHASES
from umbra.services.reporting.tables import clock, number, rich_table

CURVES = ("reward/mean", "loss", "response_length/mean", "staleness/total/mean", "entropy")
PUSHES_SHOWN = 6
STUCK_SHOWN = 8
BAR_WIDTH = 24
SAMPLE_CHARS = 300


def screen(
    look: Look,
    keys: str = "",
    scroll: Scroll | None = None,
    processes: Mapping[str, str] | None = None,
) -> RenderableType:
    """Return the whole view.

    Args:
        look: what is known of the run.
        keys: what tells of them.
        scroll: if given, the view is a window as high as the screen.
        processes: a supervisor's words on its children.
    """
    head: list[RenderableType] = [_title(look)]
    if keys:  # up here, where no small window cuts it off
        head.append(Text(keys, style="dim"))
    body = _body(look, processes)
    return Group(*head, body) if scroll is None else ScrolledWindow(Group(*head), body, scroll)


def _body(look: Look, processes: Mapping[str, str] | None) -> RenderableType:
    status = look.status
    parts: list[RenderableType] = []
    if notice := notice_text(status):
        parts.append(Text(notice, style="bold green" if status.finished else "bold yellow"))
    parts += warning_lines(status)
    parts += [
        Text(f"stuck: {stuck_text(status, i)}", style="bold red")
        for i in range(min(len(status.stuck), STUCK_SHOWN))
    ]
    top = beside(_curves(status), _staleness(status))
    parts += [top, Rule("samples", style="dim"), _ledger(look)]
    parts += [Rule("services", style="dim"), member_table(status, processes)]
    if look.pushes:
        parts += [Rule("last pushes, ms", style="dim"), _pushes(look)]
    if look.samples:
        parts += [Rule("a sample", style="dim"), _sample(look.samples[-1])]
    parts += [
        Text(f"refused: {text}", style="yellow") for text in refused_texts(status)[:REFUSED_SHOWN]
    ]
    if counters := counters_text(status):
        parts += [Rule("counters", style="dim"), Text(counters, style="dim")]
    return Group(*parts)


def _title(look: Look) -> RenderableType:
    status = look.status
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(1, status.steps), completed=status.version, width=30),
        Text(
            f"step {status.version}/{status.steps}  {number(status.rates.steps_per_s)}/s"
            f"{eta_text(status)}"
        ),
    )
    name = Text.assemble(
        ("umbra ", "bold"), status.run_id, f"  {status.state}  {clock(status.uptime_s)}"
    )
    return Group(name, bar)


def _curves(status: Status) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for name in CURVES:
        values = [v for v in status.curves.values.get(name, []) if v is not None]
        if values:
            line = Text(sparkline(values), style="cyan")
            table.add_row(name, line, Text(number(values[-1]), style="bold"))
    if not table.rows:
        table.add_row(Text("no step is done yet", style="dim"))
    return table


def _staleness(status: Status) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(staleness_text(status.staleness)))
    total = sum(status.staleness_counts)
    for staleness, count in enumerate(status.staleness_counts):
        table.add_row(_bar(f"{staleness:>3}", count, total))
    return table


def _ledger(look: Look) -> RenderableType:
    status = look.status
    ledger, rates = status.ledger, status.rates
    table = Table.grid(padding=(0, 1))
    table.add_row("ledger", Text(ledger_text(status)))
    flow = ", ".join(
        f"{number(rate)}/s {what}"
        for what, rate in (
            ("issued", rates.issued_per_s),
            ("answered", rates.answers_per_s),
            ("trained", rates.samples_per_s),
            ("ended", rates.ended_per_s),
        )
    )
    table.add_row("flow", Text(flow))
    table.add_row("health", Text(health_text(status.health)))
    in_flight = sum(ledger.in_flight.values())
    for state, count in ledger.in_flight.items():
        table.add_row("", _bar(f"{state:>10}", count, in_flight))
    if evals := evals_text(status):
        table.add_row("evals", Text(evals))
    return table


def _pushes(look: Look) -> RenderableType:
    columns = ("version", "receiver", "plane", *PHASES)
    table = rich_table(columns, right=("version", *PHASES))
    for push in reversed(look.pushes[-PUSHES_SHOWN:]):
        phases = (getattr(push, f"{phase}_s") for phase in PHASES)
        table.add_row(
            str(push.version),
            Text(push.receiver),
            Text(push.plane),
            *(f"{1e3 * seconds:.1f}" for seconds in phases),
        )
    return table


def _sample(sample: SampleSeen) -> RenderableType:
    branches = f"{sample.branches} branches  " if sample.branches > 1 else ""
    facts = (
        f"{sample.sample}  reward {sample.reward:.3g}  {sample.tokens} tokens  {sample.turns} "
        f"turns  {branches}{sample.seconds:.2f} s  "
        f"versions {sample.versions[0]}-{sample.versions[1]}  {sample.finish_reason}"
    )
    text = Text.assemble((_short(sample.prompt), "dim"), "\n", (_short(sample.response), "green"))
    return Panel(text, title=Text(facts), title_align="left", border_style="dim")


def _short(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}…"


def _bar(label: str, count: int, total: int) -> Text:
    filled = round(BAR_WIDTH * count / total) if total else 0
    share = f"{count / total:.0%}" if total else ""
    return Text.assemble(
        f"{label} ",
        ("█" * filled, "cyan"),
        ("·" * (BAR_WIDTH - filled), "dim"),
        f" {count} {share}",
    )
