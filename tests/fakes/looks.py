"""States of a run that a monitor may see."""

from __future__ import annotations

from typing import Any

from umbra.proto.messages import Curves, Event, Header, Member, Rates, RunWarning, Status, Stuck
from umbra.proto.records import Ledger
from umbra.services.monitor.client import Feed, Look

PUSH = {
    "version": 40, "receiver": "generator-0", "plane": "shm", "bytes": 1000, "epoch": 7,
    "snapshot_s": 0.0002, "wire_s": 0.0123, "stage_s": 0, "commit_s": 0.001, "total_s": 0.02,
}  # fmt: skip
ROLLOUT: dict[str, Any] = {
    "step": 40, "sample": "s-9", "group": "g-1", "prompt_id": "3", "reward": 1.25, "tokens": 5,
    "reward_parts": {"right": 1.0, "short": 0.25}, "turns": 2, "seconds": 0.5, "staleness": 2,
    "finish_reason": "stop", "prompt": "ask", "response": "☃ envnew",
}  # fmt: skip


def member(name: str, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "role": "generator", "incarnation": "a", "pid": 1, "host": "h", "state": "ready",
        "activity": "decoding", "progress": 1, "idle_s": 0.1, "silent_s": 0.2,
    }  # fmt: skip
    return Member(name=name, **{**fields, **changes})


def status(**changes: Any) -> Status:
    fields: dict[str, Any] = {
        "run_id": "run-1", "state": "ready", "uptime_s": 75.0, "version": 40, "steps": 300,
        "ledger": Ledger(issued=100, trained=80, in_flight={"generating": 15, "ready": 5}),
        "members": [
            member("generator-0", stats={"decoded_per_s": 4321.0, "version": 39.0},
                   shares={"decode": 0.7, "idle: work": 0.3}),
        ],
        "departed": {}, "staleness": {"mean": 1.125, "max": 2.0, "bound": 2.0},
        "counters": {"expired_leases": 2},
        "stuck": [Stuck(what="sample s1", holder="generator-0", age_s=31.0, action="leased again")],
        "staleness_counts": [20, 60],
        "curves": Curves(
            steps=[1, 2], values={"reward/mean": [0.1, 0.875], "loss": [None, -0.5]}
        ),
        "rates": Rates(
            steps_per_s=2.0, samples_per_s=128.0, answers_per_s=129.0, issued_per_s=130.0,
            ended_per_s=2.0,
        ),
        "health": {"equal_rewards": 0.875},
        "warnings": [
            RunWarning(name="equal_rewards", text="88% are", figures={"share": 0.875}, since=30),
            RunWarning(name="truncated", text="they were", figures={}, since=1, until=9),
        ],
    }  # fmt: skip
    return Status(**{**fields, **changes})


def header(sender: str = "m") -> Header:
    return Header(major=1, minor=2, type="Event", id=1, sender=sender, incarnation="i")


def heard(*events: tuple[str, dict[str, Any]]) -> Feed:
    feed = Feed()
    for kind, fields in events:
        feed.receive(header(), Event(kind=kind, fields=fields))
    return feed


def look(**changes: Any) -> Look:
    return heard(("push", PUSH), ("rollout", ROLLOUT)).look(status(**changes))
