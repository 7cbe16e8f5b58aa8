"""A run's status for people: a screen with colours for a terminal, lines for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from rich.console import Group
from rich.text import Text

from umbra.proto.messages import Member, Status, Stuck
from umbra.proto.records import EvalReport
from umbra.services.monitor.client import Look, RolloutEvent
from umbra.services.reporting import (
    PHASES,
    aligned,
    busy,
    clock,
    counts,
    idle_causes,
    number,
    shown_scores,
)

BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    "reward/mean", "samples_per_s", "loss", "response_length/mean", "staleness/total/mean",
    "entropy",
)  # fmt: skip
WIDE = 120  # columns of a terminal, below which `LEFT_OUT` is left out
LEFT_OUT = ("incarnation", "activity")
NUMBERS = ("version", "lag", "tokens_s", "busy")
FLOW = {  # names of rates, and how they are called
    "steps": "steps", "issued": "issued", "answers": "answered", "samples": "trained",
    "ended": "ended",
}  # fmt: skip
MEMBERS_SHOWN = 24
PUSHES_SHOWN = 6
SAMPLE_CHARS = 300
STYLES = {"ready": "", "running": "", "done": "dim", "stopped": "dim", "failed": "bold red"}


def status_dict(status: Status) -> dict[str, Any]:
    values = msgspec.to_builtins(status)
    values["ledger"]["balance"] = status.ledger.balance
    for member, row in zip(status.members, values["members"], strict=True):
        row["busy"] = busy(member.shares) if member.shares else None
    return values


def look_dict(look: Look) -> dict[str, Any]:
    events = {"pushes": look.pushes, "rollouts": look.rollouts}
    return status_dict(look.status) | msgspec.to_builtins(events)


def headline(status: Status) -> str:
    """Return the state of a run in a line; before training only the work in progress."""
    open_evals = [eval_text(report) for report in status.evals if not report.done]
    if not status.ledger.issued:
        names = [f"{member.name} {member.activity or member.state}" for member in status.members]
        now = ", ".join([*open_evals, *names]) or "no process has joined yet"
        return f"starting: before training; {now}"
    trained, answers_per_s = status.ledger.trained, number(status.rates.answers_per_s)
    of = status.staleness if trained else {}
    bound = f", bound {of['bound']:g}" if "bound" in of else ""
    staleness = f"{of['mean']:.2f} (max {of.get('max', 0):g}{bound})" if "mean" in of else "-"
    ess = [m.stats["ess"] for m in status.members if m.role == "trainer" and "ess" in m.stats]
    samples = number(status.rates.samples_per_s) if trained else f"-  answers/s {answers_per_s}"
    failed, balance = status.ledger.ended.get("failed"), status.ledger.balance
    reward = next(iter(status.curves.values.get("reward/mean", [])[-1:]), None)  # of recent steps
    parts = [
        f"step {status.version}/{status.steps}",
        "" if reward is None else f"reward {reward:.3f}",
        f"staleness {staleness}",
        *(f"ess {value:.2f}" for value in ess),
        f"samples/s {samples}",
        f"in flight {sum(status.ledger.in_flight.values())}",
        f"failed {failed}" if failed else "",
        *(f"warning: {name}" for name in active_warnings(status)),
        *open_evals,
        f"LEDGER OFF BY {balance}" if balance else "",
        *(f"stuck: {_stuck_text(stuck)}" for stuck in status.stuck[:1]),
    ]
    return "  ".join(filter(None, parts))


def active_warnings(status: Status) -> dict[str, str]:
    return {one.name: one.text for one in status.warnings if one.until < 0}


def health_text(health: Mapping[str, float]) -> str:
    """Return the recent shares without a training signal."""
    names = {
        "equal_rewards": "of groups with equal rewards",
        "truncated": "of answers cut off",
        "failed_samples": "of samples failed",
    }
    return ", ".join(f"{health.get(name, 0.0):.1%} {label}" for name, label in names.items())


class NewWarnings:
    """Each warning as a line, once; the headline only names those that hold."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def lines(self, status: Status) -> list[str]:
        active = active_warnings(status)
        new, self._names = active.keys() - self._names, self._names | active.keys()
        return [f"warning: {name}: {text}" for name, text in active.items() if name in new]


def notice_text(status: Status) -> str:
    if status.finished:
        return f"all steps are done, the run ends: {status.ending}"
    return f"ENDING: {status.ending}" if status.ending else ""


def left_text(status: Status, *, lost: bool) -> str:
    """Return the last seen state of a run; `lost`: it does not answer any more."""
    name = f"run {status.run_id}"
    if not lost:
        return f"left {name} at step {status.version}/{status.steps}; the run goes on"
    if status.finished or status.version >= status.steps:
        return f"{name} has done all its {status.steps} steps and has ended"
    return (
        f"{name} has ended, or cannot be reached: seen at step {status.version}/{status.steps}; "
        "`umbra runs` tells what became of it"
    )


def eval_text(report: EvalReport) -> str:
    text = f"eval of version {report.version}: "
    reasons = counts(dict(sorted(report.ended.items())))
    if not report.done or report.answered < report.samples:
        text += f"{report.answered}/{report.samples} answered"
        text += f" ({reasons}), " if reasons else ", "
    if not report.answered:
        return text + "no accuracy yet"
    scores = [f", {name} {value:.3f}" for name, value in shown_scores(report.scores).items()]
    return f"{text}accuracy {report.accuracy:.3f}{''.join(scores)}"


def ledger_text(status: Status) -> str:
    """Return the ledger in one line: the parts sum to the issued samples."""
    ledger = status.ledger
    reasons = counts(dict(sorted(ledger.ended.items())))
    flight = counts(ledger.in_flight)
    text = f"{ledger.issued} issued = {ledger.trained} trained"
    text += f" + {sum(ledger.ended.values())} ended" + (f" ({reasons})" if reasons else "")
    text += f" + {sum(ledger.in_flight.values())} in flight"
    text += f" ({flight})" if flight else ""
    return text + (f"  OFF BY {ledger.balance}" if ledger.balance else "")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return `values` as a curve of at most `width` characters, each the mean of its share."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _stuck_text(stuck: Stuck) -> str:
    since = f" for {stuck.age_s:.0f} s" if stuck.age_s else ""
    return f"{stuck.what} at {stuck.holder}{since}"


SLOW_S = 10.0  # idle or silent for longer than this is pointed out
INCARNATION_SHOWN = 6  # characters, enough to see that it is another one


class MemberRow(NamedTuple):
    service: str
    state: str
    incarnation: str = ""
    version: str = ""
    lag: str = ""
    tokens_s: str = ""
    busy: str = ""
    idle: str = ""
    activity: str = ""


def member_rows(status: Status) -> list[MemberRow]:
    """Return a row for each member, and for each that is gone."""
    members = sorted(status.members, key=lambda member: (member.role, member.name))
    rows = {member.name: _row(member, status.version) for member in members}
    for name, why in status.departed.items():
        rows.setdefault(name, MemberRow(name, "gone", activity=why))
    return list(rows.values())


def most_telling(rows: Sequence[MemberRow], count: int) -> list[MemberRow]:
    """Return at most `count` of `rows`, in their order, preferring the ones with a problem."""
    if len(rows) <= count:
        return list(rows)
    healthy = [(row.state == "ready", not row.idle.startswith("stalled")) for row in rows]
    chosen = sorted(sorted(range(len(rows)), key=healthy.__getitem__)[: count - 1])
    return [*(rows[i] for i in chosen), MemberRow(f"and {len(rows) - len(chosen)} more", "")]


def idle_text(member: Member) -> str:
    """Return the idle share with its main cause; or the time without progress, if long."""
    if member.idle_s >= SLOW_S:
        return f"stalled {member.idle_s:.0f} s"
    causes = idle_causes(member.shares)
    if not causes:
        return "0%" if member.shares else ""
    return f"{sum(causes.values()):.0%} ({next(iter(causes))})"


def _row(member: Member, newest: int) -> MemberRow:
    stats = member.stats
    version = stats.get("version", stats.get("step", -1.0))
    tokens_s = stats.get("decoded_per_s", stats.get("train_tokens_per_s"))
    return MemberRow(
        service=member.name,
        state=f"silent {member.silent_s:.0f} s" if member.silent_s >= SLOW_S else member.state,
        incarnation=member.incarnation[:INCARNATION_SHOWN],
        version="" if version < 0 else f"{version:.0f}",
        lag="" if version < 0 else f"{max(0.0, newest - version):.0f}",
        tokens_s="" if tokens_s is None else f"{tokens_s:,.0f}",
        busy=f"{busy(member.shares):.0%}" if member.shares else "",
        idle=idle_text(member),
        activity=member.activity,
    )


def page_file(name: str) -> str:
    """Return page.html, page.css or page.js: a run in a browser, live or as report.html."""
    return files("umbra.services.monitor").joinpath(name).read_text(encoding="utf-8")


# -- the screen ------------------------------------------------------------------------------------


def screen(look: Look, width: int) -> Group:
    """Return the view for a terminal of `width` columns."""
    return Group(*lines(look, width))


def plain(look: Look) -> str:
    return "\n".join(line.plain for line in lines(look, WIDE))


def lines(look: Look, width: int) -> Iterator[Text]:
    """Yield all that is known of a run, the most urgent first."""
    status = look.status
    state = "finished" if status.finished else status.state
    yield Text(f"run {status.run_id}: {state}, up {clock(status.uptime_s)}", "bold")
    if notice := notice_text(status):
        yield Text(notice, "bold green" if status.finished else "bold yellow")
    remaining, rates = status.steps - status.version, status.rates
    is_known = rates.steps_per_s > 0 and remaining > 0
    eta = f"  about {clock(remaining / rates.steps_per_s)} left" if is_known else ""
    yield Text(f"{headline(status)}{eta}")
    for name, text in active_warnings(status).items():
        yield Text(f"warning: {name}: {text}", "yellow")
    for stuck in status.stuck:
        yield Text(f"stuck: {_stuck_text(stuck)}, {stuck.action}", "bold red")
    yield from _curves(status)
    yield Text(f"ledger: {ledger_text(status)}")
    flow = [f"{number(getattr(rates, f'{name}_per_s'))}/s {label}" for name, label in FLOW.items()]
    yield Text(f"flow: {', '.join(flow)}")
    yield Text(f"health: {health_text(status.health)}")
    evals = [one for one in status.evals if not one.done]
    evals += [one for one in status.evals if one.done][-1:]
    if evals:
        yield Text(f"evals: {'; '.join(map(eval_text, evals))}")
    yield from _members(status, width)
    yield from _pushes(look)
    if look.rollouts:
        yield from _rollout(look.rollouts[-1])
    for reason, count in sorted(status.refused.items(), key=lambda item: -item[1]):
        yield Text(f"refused: {reason}: {count} times", "yellow")


def _curves(status: Status) -> Iterator[Text]:
    for name in CURVES:
        values = [v for v in status.curves.values.get(name, []) if v is not None]
        if values:
            low, high, last = map(number, (min(values), max(values), values[-1]))
            yield Text(f"{name:21} {sparkline(values)} {low} to {high}, now {last}", "cyan")
    if total := sum(status.staleness_counts):
        shares = (f"{at}: {n / total:.0%}" for at, n in enumerate(status.staleness_counts) if n)
        yield Text(f"trained by staleness: {'  '.join(shares)}")


def _members(status: Status, width: int) -> Iterator[Text]:
    columns = [name for name in MemberRow._fields if width >= WIDE or name not in LEFT_OUT]
    rows = most_telling(member_rows(status), MEMBERS_SHOWN)
    cells = [[getattr(row, name) for name in columns] for row in rows]
    heads = [name.replace("_", "/") for name in columns]
    head, *body = aligned([heads, *cells], [columns.index(name) for name in NUMBERS])
    yield Text(f"  {head}", "bold")
    for row, text in zip(rows, body, strict=True):
        yield Text(f"  {text}", STYLES.get(row.state, "yellow"))


def _pushes(look: Look) -> Iterator[Text]:
    if look.pushes:
        rows = [
            [str(push.version), push.receiver, push.plane]
            + [f"{1e3 * getattr(push, f'{phase}_s'):.1f}" for phase in PHASES]
            for push in reversed(look.pushes[-PUSHES_SHOWN:])
        ]
        yield Text("last pushes, ms", "bold")
        for text in aligned([("version", "receiver", "plane", *PHASES), *rows], range(3, 8)):
            yield Text(f"  {text}")


def _rollout(rollout: RolloutEvent) -> Iterator[Text]:
    yield Text(
        f"{rollout.sample}  reward {rollout.reward:.3g}  {rollout.tokens} tokens  "
        f"{rollout.turns} turns  staleness {rollout.staleness}  {rollout.finish_reason}",
        "bold",
    )
    for text, style in ((rollout.prompt, "dim"), (rollout.response, "green")):
        yield Text(f"{text[:SAMPLE_CHARS]}…" if len(text) > SAMPLE_CHARS else text, style)
