"""A run as the monitors show it."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from umbra.deploy.run.live import PlainView, Progress
from umbra.deploy.run_folder import RunFolder
from umbra.proto.messages import Member, Rates, RunWarning, Status, Stuck
from umbra.proto.records import Ledger
from umbra.services.monitor.client import Look
from umbra.services.monitor.view import (
    MemberRow,
    headline,
    idle_text,
    ledger_text,
    member_rows,
    plain,
    screen,
    status_dict,
)


def member(name: str = "generator-0", **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "role": "generator",
        "incarnation": "a",
        "pid": 1,
        "host": "h",
        "state": "ready",
        "activity": "decoding",
        "progress": 100,
        "idle_s": 0.1,
        "silent_s": 0.2,
        "stats": {"decoded_per_s": 1234.5, "version": 3.0, "live": 8.0},
        "shares": {"decode": 0.75, "idle: work": 0.25},
    }
    return Member(name=name, **{**fields, **changes})


def status(**changes: Any) -> Status:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "state": "ready",
        "uptime_s": 75.0,
        "version": 40,
        "steps": 300,
        "ledger": Ledger(
            issued=100, trained=80, ended={"stale": 4}, in_flight={"generating": 10, "ready": 6}
        ),
        "members": [member()],
        "departed": {},
        "staleness": {"mean": 1.125, "max": 2.0, "bound": 2.0},
        "counters": {"malformed": 0, "expired_leases": 2},
        "stuck": [],
    }
    return Status(**{**fields, **changes})


STUCK = Stuck(what="sample s1", holder="generator-0", age_s=31.0, action="leased again")


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_headline() -> None:
    line = headline(status(stuck=[STUCK], rates=Rates(samples_per_s=1200.4)), reward=0.45)
    assert line == (
        "step 40/300  reward 0.450  staleness 1.12 (max 2, bound 2)  samples/s 1,200  "
        "in flight 16  stuck: sample s1 at generator-0 for 31 s"
    )
    before = status(ledger=Ledger(issued=0, trained=0, ended={}, in_flight={}))
    assert headline(before) == "starting: before training; generator-0 decoding"


EQUAL = RunWarning(name="equal_rewards", text="95% of them are", figures={"share": 0.95}, since=3)
OVER = RunWarning(name="truncated", text="cut", figures={"share": 0.3}, since=1, until=2)


def test_a_warning_that_holds_is_shown_everywhere_and_told_once(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    warned = status(warnings=[EQUAL, OVER], health={"equal_rewards": 0.875})
    sentence = "warning: equal_rewards: 95% of them are"
    assert "  warning: equal_rewards" in headline(warned)
    assert "truncated" not in headline(warned)
    assert sentence in plain(Look(warned)).splitlines()
    assert sentence in shown(screen(Look(warned), 120))
    shares = "87.5% of groups with equal rewards, 0.0% of answers cut off, 0.0% of samples failed"
    assert f"health: {shares}" in plain(Look(warned)).splitlines()
    assert shares in shown(screen(Look(warned), 120))
    values = json.loads(json.dumps(status_dict(warned)))
    assert [(one["name"], one["until"]) for one in values["warnings"]] == [
        ("equal_rewards", -1), ("truncated", 2),
    ]  # fmt: skip
    progress = Progress(RunFolder(tmp_path))
    progress.status = warned
    view = PlainView(every_s=5.0, clock=lambda: 0.0)
    view.update(progress, {})
    view.update(progress, {})
    assert capsys.readouterr().out == sentence + "\n"


def test_an_unbalanced_ledger_is_shouted() -> None:
    wrong = status(ledger=Ledger(issued=5, trained=3))
    assert "LEDGER OFF BY 2" in headline(wrong)
    assert ledger_text(wrong).endswith("OFF BY 2")


def test_members_gone_and_processes_without_membership_are_shown() -> None:
    rows = member_rows(
        status(departed={"generator-1": "silent for 15 s"}),
        {
            "buffer": "running",
            "generator-0": "running",
            "generator-2": "restarts in 0.5 s",
            "trainer": "running",
        },
    )
    assert rows == [
        MemberRow(
            "generator-0",
            "ready",
            "a",
            "3",
            "37",
            "1,234",
            "75%",
            "25% (work)",
            "decoding",
        ),
        MemberRow("generator-1", "gone", activity="silent for 15 s"),
        MemberRow("generator-2", "restarts in 0.5 s"),
        MemberRow("trainer", "starting"),
    ]


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({}, ""),
        ({"decode": 1.0}, "0%"),
        ({"train_step": 0.5, "wait_batch": 0.4, "wait_slot": 0.1}, "50% (batch)"),
        ({"idle: weights": 0.05, "idle: environment": 0.15, "decode": 0.8}, "20% (environment)"),
    ],
)
def test_idleness_has_a_cause(shares: dict[str, float], text: str) -> None:
    assert idle_text(member(shares=shares)) == text
