"""A run as the monitors show it: what a terminal draws, and what it keeps of telemetry."""

import io
import json
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.looks import PUSH, ROLLOUT, header, heard, look, member, status
from rich.console import Console

from umbra.deploy.run.live import Progress, View
from umbra.proto.errors import PeerLostError
from umbra.proto.messages import Event, Rates
from umbra.proto.records import Ledger
from umbra.services.monitor import command
from umbra.services.monitor.client import PUSHES_KEPT, SPANS_KEPT, Look, PushEvent
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


def drawn(what: Look, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(what, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_headline() -> None:
    line = headline(status(rates=Rates(samples_per_s=1200.4), warnings=[], health={}))
    assert line == (
        "step 40/300  reward 0.875  staleness 1.12 (max 2, bound 2)  samples/s 1,200  "
        "in flight 20  stuck: sample s1 at generator-0 for 31 s"
    )
    before = status(ledger=Ledger(issued=0, trained=0, ended={}, in_flight={}))
    assert headline(before) == "starting: before training; generator-0 decoding"
    wrong = status(ledger=Ledger(issued=5, trained=3))
    assert "LEDGER OFF BY 2" in headline(wrong)
    assert ledger_text(wrong).endswith("OFF BY 2")


def test_a_warning_that_holds_is_shown_everywhere_and_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warned = status(stuck=[])
    sentence = "warning: equal_rewards: 88% are"
    assert "  warning: equal_rewards" in headline(warned)
    assert "truncated" not in headline(warned)
    shares = "87.5% of groups with equal rewards, 0.0% of answers cut off, 0.0% of samples failed"
    for line in (sentence, f"health: {shares}"):
        assert line in plain(Look(warned)).splitlines()
        assert line in drawn(Look(warned), 120)
    values = json.loads(json.dumps(status_dict(warned)))
    assert [(one["name"], one["until"]) for one in values["warnings"]] == [
        ("equal_rewards", -1), ("truncated", 9),
    ]  # fmt: skip
    progress = Progress()
    progress.status = warned
    view = View()
    view.update(progress)
    view.update(progress)
    assert capsys.readouterr().out == sentence + "\n"


def test_members_are_shown_also_those_that_are_gone() -> None:
    stats = {"decoded_per_s": 1234.5, "version": 3.0, "live": 8.0}
    decodes = member("generator-0", stats=stats, shares={"decode": 0.75, "idle: work": 0.25})
    gone = {"generator-0": "drained", "generator-1": "silent for 15 s"}
    assert member_rows(status(members=[decodes], departed=gone)) == [
        MemberRow("generator-0", "ready", "a", "3", "37", "1,234", "75%", "25% (work)", "decoding"),
        MemberRow("generator-1", "gone", activity="silent for 15 s"),
    ]  # fmt: skip


def test_idleness_has_a_cause() -> None:
    for shares, text in (
        ({}, ""),
        ({"decode": 1.0}, "0%"),
        ({"train_step": 0.5, "wait_batch": 0.4, "wait_slot": 0.1}, "50% (batch)"),
        ({"idle: weights": 0.05, "idle: environment": 0.15, "decode": 0.8}, "20% (environment)"),
    ):
        assert idle_text(member("generator-0", shares=shares)) == text


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("push", PUSH | {"receiver": "g\x1b[2J"}),
        ("push", PUSH | {"wire_s": float("inf")}),
        ("rollout", ROLLOUT | {"response": [1]}),
        ("rollout", ROLLOUT | {"finish_reason": "stop\nERROR all is lost"}),
        ("rollout", ROLLOUT | {"reward": float("nan")}),
        ("spans", {"spans": [["decode", 1.0]]}),
        ("spans", {"spans": [["update", float("-inf"), 2.0]]}),
    ],
)
def test_what_cannot_be_drawn_is_counted_and_left_out(kind: str, fields: dict[str, Any]) -> None:
    feed = heard((kind, fields))
    assert feed.invalid == 1
    seen = feed.look(status())
    assert not (seen.pushes or seen.rollouts or seen.spans)


def test_words_of_others_have_no_control_characters_and_are_no_markup() -> None:
    said = ROLLOUT | {"prompt": "a\nb\x1b[2J", "response": "c\x07\n[red]x[/nothing]"}
    feed = heard(("rollout", said), ("spans", {"spans": [["idle: a\nb", 1.0, 2.0]]}))
    seen = feed.look(status())
    (sample,) = seen.rollouts
    assert (sample.prompt, sample.response) == ("a\nb [2J", "c \n[red]x[/nothing]")
    assert seen.spans["m"][0].name == "idle: a b"
    assert not feed.invalid
    assert "[red]x[/nothing]" in drawn(seen)


def test_the_screen_has_everything() -> None:
    text = drawn(look())
    for expected in (
        "run-1", "step 40/300", "2:10 left", "reward/mean", "▁█ 0.1 to 0.875, now 0.875", "-0.5",
        "staleness 1.12 (max 2, bound 2)", "1: 75%", "100 issued = 80 trained",
        "130/s issued, 129/s answered, 128/s trained, 2/s ended", "generating",
        "warning: equal_rewards: 88% are", "87.5% of groups with equal rewards",
        "4,321", "30% (work)",
        "generator-0", "shm", "12.3", "20.0", "☃ envnew", "s-9  reward 1.25", "staleness 2",
        "stuck: sample s1 at generator-0 for 31 s, leased again", "run run-1: ready",
    ):  # fmt: skip
        assert expected in text, expected
    assert "PAUSED" not in text
    assert "expired_leases" not in text, "raw counters are in umbra status --json"
    ended = drawn(look(state="draining", ending="steps reached", finished=True))
    assert "run run-1: finished" in ended and "draining" not in ended


def test_events_become_what_is_shown() -> None:
    spans = ([["decode", 1.0, 2.0]], [["idle: work", 2.0, 3.0]])
    seen = heard(
        ("push", PUSH), ("rollout", ROLLOUT), *(("spans", {"spans": own}) for own in spans),
        ("of no interest", {}),
    ).look(status())  # fmt: skip
    assert seen.pushes == [PushEvent(**{k: v for k, v in PUSH.items() if k != "epoch"})]
    assert [one.sample for one in seen.rollouts] == ["s-9"]
    assert seen.spans["m"] == [("push", -0.02, 0.0), ("decode", 1.0, 2.0), ("idle: work", 2.0, 3.0)]


def test_what_is_kept_is_bounded() -> None:
    feed = heard(*[("push", {**PUSH, "version": i}) for i in range(3 * PUSHES_KEPT)])
    seen = feed.look(status())
    assert len(seen.pushes) == PUSHES_KEPT
    assert seen.pushes[-1].version == 3 * PUSHES_KEPT - 1
    for number in range(300):
        spans = [["decode", float(i), i + 1.0] for i in range(100)]
        sender = "busy" if number % 2 else f"other-{number}"
        feed.receive(header(sender), Event(kind="spans", fields={"spans": spans}))
    seen = feed.look(status())
    assert len(seen.spans["busy"]) == SPANS_KEPT
    assert len(seen.spans) <= 256


@pytest.mark.parametrize(("flags", "shown", "told"), [([], 2, 1), (["--web", ":0"], 3, 2)])
def test_a_watch_ends_with_its_run_but_a_page_awaits_it(
    flags: list[str], shown: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, True, False, False, True])

    def seen(_timeout_s: float) -> Look:
        if (is_there := next(answers, None)) is None:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
        if not is_there:
            raise PeerLostError("no answer")
        return Look(status())

    watch = SimpleNamespace(look=seen)
    monkeypatch.setattr(command, "Watch", lambda *_: nullcontext(watch))
    monkeypatch.setattr(command, "LOOK_S", 0.01)
    roles: list[Any] = []
    monkeypatch.setattr(command, "open_security", lambda _folder, own: roles.append(own))
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(command, "sys", SimpleNamespace(stdout=terminal))
    options = ["--broker", "tcp://127.0.0.1:1", *flags]
    dumb = {"TERM": "dumb", "TTY_COMPATIBLE": "1"}  # a terminal on which no screen can be drawn
    result = CliRunner(env=dumb).invoke(command.monitor, options, standalone_mode=False)
    assert result.return_value == 0
    assert roles == [("monitor", "operator")]  # the key that may do least, if it is there
    assert result.stdout.count("step 40/300") == shown
    lost = [line for line in result.stderr.splitlines() if "cannot be reached" in line]
    assert len(lost) == told and lost[0].startswith("umbra: run run-1")
