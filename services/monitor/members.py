"""The members of a run as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from umbra.proto.messages import Member, Status
from umbra.services.monitor.rates import Rates

SLOW_S = 10.0  # idle or silent for longer than this is pointed out
IDLE = ("idle", "wait")  # what activities begin with that are idleness
INCARNATION_SHOWN = 6  # characters, enough to see that it is another one
SHOWN_APART = ("version", "step", "tok_s", "tokens_per_s")


class MemberRow(NamedTuple):
    """What is shown of one member, in words."""

    name: str
    state: str
    incarnation: str = ""
    version: str = ""
    lag: str = ""
    tokens_s: str = ""
    busy: str = ""
    idle: str = ""
    activity: str = ""
    figures: str = ""


def member_rows(
    status: Status, rates: Rates, processes: Mapping[str, str] | None = None
) -> list[MemberRow]:
    """A row for everyone.

    `processes` are the supervisor's words on its children; those that are no members show, too.
    """
    rows = [
        _row(member, status.version, rates)
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
    """At most `count` of `rows`, in their order: those that are not just fine before the others."""
    if len(rows) <= count:
        return list(rows)
    by_need = sorted(rows, key=lambda row: (row.state == "ready", not row.idle.startswith("still")))
    kept = set(by_need[: count - 1])
    shown = [row for row in rows if row in kept]
    return [*shown, MemberRow(f"and {len(rows) - len(shown)} more", "")]


def idle_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """The shares that are idleness, by cause, the largest first."""
    idle = {cause_of(name): share for name, share in shares.items() if name.startswith(IDLE)}
    return dict(sorted(idle.items(), key=lambda item: -item[1]))


def cause_of(activity: str) -> str:
    """What an idle activity waits for: `work` of "idle: work", `batch` of "wait_batch"."""
    for begin in ("idle: ", "wait_", "idle", "wait"):
        if activity.startswith(begin) and len(activity) > len(begin):
            return activity.removeprefix(begin)
    return activity


def idle_text(member: Member) -> str:
    """The idle share with its main cause; or for how long nothing has moved, if that is long."""
    if member.idle_s >= SLOW_S:
        return f"still for {member.idle_s:.0f} s"
    idle = idle_shares(member.shares)
    if not idle:
        return "0%" if member.shares else ""
    cause = next(iter(idle))
    return f"{sum(idle.values()):.0%} ({cause})"


def number(value: float) -> str:
    """A figure in few characters."""
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _row(member: Member, newest: int, rates: Rates) -> MemberRow:
    stats = member.stats
    version = stats.get("version", stats.get("step"))
    tokens_s = stats.get("tok_s", stats.get("tokens_per_s"))
    busy = 1.0 - sum(idle_shares(member.shares).values())
    figures = [f"{key} {number(value)}" for key, value in stats.items() if key not in SHOWN_APART]
    if member.name in rates.members and tokens_s is None:
        figures.insert(0, f"{rates.members[member.name]:.1f}/s")
    return MemberRow(
        name=member.name,
        state=f"silent {member.silent_s:.0f} s" if member.silent_s >= SLOW_S else member.state,
        incarnation=member.incarnation[:INCARNATION_SHOWN],
        version="" if version is None or version < 0 else f"{version:.0f}",
        lag="" if version is None or version < 0 else f"{max(0.0, newest - version):.0f}",
        tokens_s="" if tokens_s is None else f"{tokens_s:,.0f}",
        busy=f"{busy:.0%}" if member.shares else "",
        idle=idle_text(member),
        activity=member.activity,
        figures="  ".join(figures),
    )
