"""A run's status for people: tables for a terminal, lines for a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from umbra.proto.messages import Member, Status, Stuck
from umbra.proto.records import EvalReport
from umbra.services.reporting.figures import busy, idle_causes, telling
from umbra.services.reporting.tables import clock, counts, number

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = (
    "service", "state", "incarnation", "version", "lag", "tokens/s", "busy", "idle", "activity",
)  # fmt: skip


def status_dict(status: Status) -> dict[str, Any]:
    values = msgspec.to_builtins(status)
    values["ledger"]["balance"] = status.ledger.balance
    for member, found in zip(status.members, values["members"], strict=True):
        found["busy"] = busy(member.shares) if member.shares else None
    return values


def headline(status: Status, reward: float | None = None) -> str:
    """Return the state of a run in a line; before training only the work in progress."""
    if not status.ledger.issued:
        return starting_text(status)
    parts = [f"step {status.version}/{status.steps}"]
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    parts.append(staleness_text(status.staleness if status.ledger.trained else {}))
    ess = [m.stats["ess"] for m in status.members if m.role == "trainer" and "ess" in m.stats]
    parts += [f"ess {value:.2f}" for value in ess]
    parts.append(speed_text(status))
    parts.append(f"in flight {sum(status.ledger.in_flight.values())}")
    if failed := status.ledger.ended.get("failed"):
        parts.append(f"failed {failed}")
    parts += [f"warning: {name}" for name in holding(status)]
    parts += [eval_text(one) for one in status.evals if not one.done]
    if status.ledger.balance:
        parts.append(f"LEDGER OFF BY {status.ledger.balance}")
    parts += [f"stuck: {_where(stuck)}" for stuck in status.stuck[:1]]
    return "  ".join(parts)


def starting_text(status: Status) -> str:
    now = [eval_text(one) for one in status.evals if not one.done]
    now += [f"{member.name} {member.activity or member.state}" for member in status.members]
    return f"starting: before training; {', '.join(now) or 'no process has joined yet'}"


def speed_text(status: Status) -> str:
    if not status.ledger.trained:
        return f"samples/s -  answers/s {number(status.rates.answers_per_s)}"
    return f"samples/s {number(status.rates.samples_per_s)}"


def holding(status: Status) -> dict[str, str]:
    return {one.name: one.text for one in status.warnings if one.until < 0}


def health_text(health: Mapping[str, float], of: str = "") -> str:
    """Return shares without a training signal: recent, or with `of` = "/run" of the whole run."""
    names = {
        "equal_rewards": "of groups with equal rewards",
        "truncated": "of answers cut off",
        "failed_samples": "of samples failed",
    }
    return ", ".join(f"{health.get(name + of, 0.0):.1%} {what}" for name, what in names.items())


class NewWarnings:
    """Each warning as a line, once; the headline only names those that hold."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def lines(self, status: Status) -> list[str]:
        new = {name: text for name, text in holding(status).items() if name not in self._told}
        self._told |= set(new)
        return [f"warning: {name}: {text}" for name, text in new.items()]


def staleness_text(staleness: Mapping[str, float]) -> str:
    if "mean" not in staleness:
        return "staleness -"
    bound = f", bound {staleness['bound']:g}" if "bound" in staleness else ""
    return f"staleness {staleness['mean']:.2f} (max {staleness.get('max', 0):g}{bound})"


def notice_text(status: Status) -> str:
    if status.finished:
        return f"all steps are done, the run ends: {status.ending}"
    if status.ending:
        return f"ENDING: {status.ending}"
    return f"PAUSED: {status.paused} (`umbra resume` goes on)" if status.paused else ""


def left_text(status: Status, *, lost: bool) -> str:
    """Return the last seen state of a run; `lost`: it does not answer any more."""
    at = f"run {status.run_id}"
    if not lost:
        return f"left {at} at step {status.version}/{status.steps}; it goes on"
    if status.finished or status.version >= status.steps:
        return f"{at} has done all its {status.steps} steps and has ended"
    return (
        f"{at} has ended, or cannot be reached: seen at step {status.version}/{status.steps}; "
        "`umbra runs` tells what became of it"
    )


def eval_text(report: EvalReport) -> str:
    text = f"eval of version {report.version}: "
    ended = counts(dict(sorted(report.ended.items())))
    if not report.done or report.answered < report.samples:
        text += f"{report.answered}/{report.samples} answered"
        text += f" ({ended}), " if ended else ", "
    if not report.answered:
        return text + "no accuracy yet"
    scores = [f", {name} {value:.3f}" for name, value in telling(report.scores).items()]
    return f"{text}accuracy {report.accuracy:.3f}{''.join(scores)}"


def evals_text(status: Status) -> str:
    done = [one for one in status.evals if one.done][-1:]
    open_ = [one for one in status.evals if not one.done]
    return "; ".join(map(eval_text, [*open_, *done]))


def ledger_text(status: Status) -> str:
    """Return the ledger in one line: the parts sum to the issued samples."""
    ledger = status.ledger
    ended = counts(dict(sorted(ledger.ended.items())))
    flight = counts(ledger.in_flight)
    text = f"{ledger.issued} issued = {ledger.trained} trained"
    text += f" + {sum(ledger.ended.values())} ended" + (f" ({ended})" if ended else "")
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


def stuck_text(status: Status, index: int) -> str:
    stuck = status.stuck[index]
    return f"{_where(stuck)}, {stuck.action}"


def _where(stuck: Stuck) -> str:
    since = f" for {stuck.age_s:.0f} s" if stuck.age_s else ""
    return f"{stuck.what} at {stuck.holder}{since}"


def refused_texts(status: Status) -> list[str]:
    most = sorted(status.refused.items(), key=lambda item: -item[1])
    return [f"{what}: {count} times" for what, count in most]


def eta_text(status: Status) -> str:
    left = status.steps - status.version
    if status.rates.steps_per_s <= 0 or left <= 0:
        return ""
    return f"  about {clock(left / status.rates.steps_per_s)} left"


SLOW_S = 10.0  # idle or silent for longer than this is pointed out
INCARNATION_SHOWN = 6  # characters, enough to see that it is another one


class MemberRow(NamedTuple):
    name: str
    state: str
    incarnation: str = ""
    version: str = ""
    lag: str = ""
    tokens_s: str = ""
    busy: str = ""
    idle: str = ""
    activity: str = ""


def member_rows(status: Status, processes: Mapping[str, str] | None = None) -> list[MemberRow]:
    """Return a row for each member.

    `processes` are the supervisor's words on its children; children that are no members show, too.
    """
    rows = [
        _row(member, status.version)
        for member in sorted(status.members, key=lambda m: (m.role, m.name))
    ]
    present = {member.name for member in status.members}
    absent = {name: ("gone", why) for name, why in status.departed.items()}
    for name, state in (processes or {}).items():
        if name != "buffer" or state != "running":  # the buffer answers, but is no member
            absent[name] = ("starting", "") if state == "running" else (state, "")
    rows += [
        MemberRow(name, state, activity=why)
        for name, (state, why) in absent.items()
        if name not in present
    ]
    return rows


def most_telling(rows: Sequence[MemberRow], count: int) -> list[MemberRow]:
    """Return at most `count` of `rows`, in their order, preferring the ones with a problem."""
    if len(rows) <= count:
        return list(rows)
    by_need = sorted(rows, key=lambda row: (row.state == "ready", not row.idle.startswith("still")))
    kept = set(by_need[: count - 1])
    shown = [row for row in rows if row in kept]
    return [*shown, MemberRow(f"and {len(rows) - len(shown)} more", "")]


def idle_text(member: Member) -> str:
    """Return the idle share with its main cause; or the time without progress, if long."""
    if member.idle_s >= SLOW_S:
        return f"still for {member.idle_s:.0f} s"
    causes = idle_causes(member.shares)
    if not causes:
        return "0%" if member.shares else ""
    return f"{sum(causes.values()):.0%} ({next(iter(causes))})"


def _row(member: Member, newest: int) -> MemberRow:
    stats = member.stats
    version = stats.get("version", stats.get("step"))
    tokens_s = stats.get("decoded_per_s", stats.get("train_tokens_per_s"))
    return MemberRow(
        name=member.name,
        state=f"silent {member.silent_s:.0f} s" if member.silent_s >= SLOW_S else member.state,
        incarnation=member.incarnation[:INCARNATION_SHOWN],
        version="" if version is None or version < 0 else f"{version:.0f}",
        lag="" if version is None or version < 0 else f"{max(0.0, newest - version):.0f}",
        tokens_s="" if tokens_s is None else f"{tokens_s:,.0f}",
        busy=f"{busy(member.shares):.0%}" if member.shares else "",
        idle=idle_text(member),
        activity=member.activity,
    )
