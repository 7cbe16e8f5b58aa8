"""Render a run's status as lines: with colours for a terminal, without for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from umbra.proto.messages import Rates, Status
from umbra.services.monitor.feed import Look, RolloutSeen
from umbra.services.monitor.view import (
    COLUMNS,
    eta_text,
    evals_text,
    headline,
    health_text,
    holding,
    ledger_text,
    member_rows,
    most_telling,
    notice_text,
    refused_texts,
    sparkline,
    stuck_text,
)
from umbra.services.reporting.figures import PHASES
from umbra.services.reporting.tables import aligned, clock, number

CURVES = (
    "reward/mean", "samples_per_s", "loss", "response_length/mean", "staleness/total/mean",
    "entropy",
)  # fmt: skip
WIDE = 120  # columns of a terminal, below which a member's activity is left out
NARROW_COLUMNS = ("service", "state", "version", "lag", "tokens/s", "busy", "idle")
NUMBERS = ("version", "lag", "tokens/s", "busy")
MEMBERS_SHOWN = 24
PUSHES_SHOWN = 6
SAMPLE_CHARS = 300
STYLES = {"ready": "", "running": "", "done": "dim", "stopped": "dim", "failed": "bold red"}


class StyledLine(NamedTuple):
    text: str
    style: str = ""


def screen(look: Look, width: int, processes: Mapping[str, str] | None = None) -> RenderableType:
    """Return the view for a terminal of `width` columns.

    `processes` are a supervisor's words on its children.
    """
    shown = lines(look, width, processes)
    return Group(*(Text(line.text, style=line.style) for line in shown))


def plain(look: Look) -> str:
    return "\n".join(line.text for line in lines(look, WIDE))


def lines(
    look: Look, width: int, processes: Mapping[str, str] | None = None
) -> Iterator[StyledLine]:
    """Yield all that is known of a run, the most urgent first."""
    status = look.status
    state = "finished" if status.finished else status.state
    yield StyledLine(f"run {status.run_id}: {state}, up {clock(status.uptime_s)}", "bold")
    if notice := notice_text(status):
        yield StyledLine(notice, "bold green" if status.finished else "bold yellow")
    yield StyledLine(f"{headline(status)}{eta_text(status)}")
    for name, text in holding(status).items():
        yield StyledLine(f"warning: {name}: {text}", "yellow")
    for index in range(len(status.stuck)):
        yield StyledLine(f"stuck: {stuck_text(status, index)}", "bold red")
    yield from _curves(status)
    yield StyledLine(f"ledger: {ledger_text(status)}")
    yield StyledLine(f"flow: {_flow(status.rates)}")
    yield StyledLine(f"health: {health_text(status.health)}")
    if evals := evals_text(status):
        yield StyledLine(f"evals: {evals}")
    yield from _members(status, width, processes)
    yield from _pushes(look)
    if look.rollouts:
        yield from _rollout(look.rollouts[-1])
    for text in refused_texts(status):
        yield StyledLine(f"refused: {text}", "yellow")


def _curves(status: Status) -> Iterator[StyledLine]:
    for name in CURVES:
        values = [v for v in status.curves.values.get(name, []) if v is not None]
        if values:
            least, most, now = map(number, (min(values), max(values), values[-1]))
            yield StyledLine(f"{name:21} {sparkline(values)} {least} to {most}, now {now}", "cyan")
    if total := sum(status.staleness_counts):
        shares = (f"{at}: {n / total:.0%}" for at, n in enumerate(status.staleness_counts) if n)
        yield StyledLine(f"trained by staleness: {'  '.join(shares)}")


def _flow(rates: Rates) -> str:
    flow = {
        "steps": rates.steps_per_s,
        "issued": rates.issued_per_s,
        "answered": rates.answers_per_s,
        "trained": rates.samples_per_s,
        "ended": rates.ended_per_s,
    }
    return ", ".join(f"{number(rate)}/s {what}" for what, rate in flow.items())


def _members(
    status: Status, width: int, processes: Mapping[str, str] | None
) -> Iterator[StyledLine]:
    columns = COLUMNS if width >= WIDE else NARROW_COLUMNS
    rows = most_telling(member_rows(status, processes), MEMBERS_SHOWN)
    cells = [[dict(zip(COLUMNS, row, strict=True))[name] for name in columns] for row in rows]
    head, *body = aligned([columns, *cells], [columns.index(name) for name in NUMBERS])
    yield StyledLine(f"  {head}", "bold")
    for row, text in zip(rows, body, strict=True):
        yield StyledLine(f"  {text}", STYLES.get(row.state, "yellow"))


def _pushes(look: Look) -> Iterator[StyledLine]:
    if look.pushes:
        rows = [
            [str(push.version), push.receiver, push.plane]
            + [f"{1e3 * getattr(push, f'{phase}_s'):.1f}" for phase in PHASES]
            for push in reversed(look.pushes[-PUSHES_SHOWN:])
        ]
        yield StyledLine("last pushes, ms", "bold")
        for text in aligned([("version", "receiver", "plane", *PHASES), *rows], range(3, 8)):
            yield StyledLine(f"  {text}")


def _rollout(one: RolloutSeen) -> Iterator[StyledLine]:
    yield StyledLine(
        f"{one.sample}  reward {one.reward:.3g}  {one.tokens} tokens  {one.turns} turns  staleness "
        f"{one.staleness}  {one.finish_reason}",
        "bold",
    )
    for text, style in ((one.prompt, "dim"), (one.response, "green")):
        yield StyledLine(f"{text[:SAMPLE_CHARS]}…" if len(text) > SAMPLE_CHARS else text, style)
