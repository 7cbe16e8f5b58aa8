"""The members of a run as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from umbra.proto.messages import Member, Status
from umbra.services.reporting.figures import busy, idle_causes
from umbra.services.reporting.tables import number

SLOW_S = 10.0  # idle or silent for longer than this is pointed out
INCARNATION_SHOWN = 6  # characters, enough to see that it is another one
SHOWN_APART = ("version", "step", "decoded_per_s", "train_tokens_per_s")


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


def member_rows(status: Status, processes: Mapping[str, str] | None = None) -> list[MemberRow]:
    """A row for everyone.

    `processes` are the supervisor's words on its children; those that are no members show, too.
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
    """At most `count` of `rows`, in their order: those that are not just fine before the others."""
    if len(rows) <= count:
        return list(rows)
    by_need = sorted(rows, key=lambda row: (row.state == "ready", not row.idle.startswith("still")))
    kept = set(by_need[: count - 1])
    shown = [row for row in rows if row in kept]
    return [*shown, MemberRow(f"and {len(rows) - len(shown)} more", "")]


def idle_text(member: Member) -> str:
    """The idle share with its main cause; or for how long nothing has moved, if that is long."""
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
    figures = [f"{key} {number(value)}" for key, value in stats.items() if key not in SHOWN_APART]
    if member.progress_per_s and tokens_s is None:
        figures.insert(0, f"progress/s {number(member.progress_per_s)}")
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
        figures="  ".join(figures),
    )
