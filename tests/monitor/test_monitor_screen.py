"""The terminal view: what it shows, what its keys do, and what it keeps of what it heard."""

import io
import os
import pty
from typing import Any

import pytest
from fakes.looks import PUSH, SAMPLE, header, heard, look, member, status
from rich.console import Console

from umbra.proto.messages import Curves, Event
from umbra.services.monitor.feed import (
    PUSHES_KEPT,
    SPANS_KEPT,
    Look,
    PushSeen,
    SampleSeen,
    look_dict,
)
from umbra.services.monitor.layout import Scroll
from umbra.services.monitor.live import HELP, KeyBindings, next_key, unbuffered
from umbra.services.monitor.screen import screen
from umbra.services.monitor.view import left_text


def shown(what: Look, footer: str = "") -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(screen(what, footer))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_has_everything() -> None:
    text = shown(look(), HELP)
    for expected in (
        "run-1", "step 40/300", "2:10 left", "reward/mean", "▁█", "0.875", "-0.5",
        "staleness 1.12 (max 2, bound 2)", "60 75%", "100 issued = 80 trained",
        "130/s issued, 129/s answered, 128/s trained, 2/s ended", "generating",
        "warning: equal_rewards: 88% are", "87.5% of groups with equal rewards",
        "15 75%", "4,321", "30% (work)",
        "generator-0", "shm", "12.3", "20.0", "sort [3 1]", "s-7  reward 1", "versions 38-39",
        "stuck: sample s1 at generator-0 for 31 s, leased again", "expired_leases 2", "q leave",
    ):  # fmt: skip
        assert expected in text, expected
    assert "PAUSED" not in text


def test_a_pause_is_shown() -> None:
    assert "PAUSED: lunch" in shown(look(paused="lunch"))


def test_a_run_that_has_just_begun() -> None:
    text = shown(Look(status(curves=Curves(), staleness={}, staleness_counts=[], stuck=[])))
    assert "no step is done yet" in text


def test_text_of_others_is_never_markup() -> None:
    feed = heard(("sample", {**SAMPLE, "response": "[red]x[/nothing]"}))
    assert "[red]x[/nothing]" in shown(Look(status(), samples=feed.look(status()).samples))


def test_a_look_as_json() -> None:
    values = look_dict(look())
    assert values["pushes"][0]["wire_s"] == 0.0123
    assert values["samples"][0]["response"] == "1 3"
    assert values["rates"]["issued_per_s"] == 130.0
    assert values["ledger"]["balance"] == 0


# -- what is heard --------------------------------------------------------------------------------


def test_events_become_what_is_shown() -> None:
    slow = {k: v for k, v in SAMPLE.items() if k not in ("prompt", "response")}
    feed = heard(
        ("push", PUSH),
        ("slow_sample", slow),
        ("slow_sample", {**slow, "seconds": 9}),
        ("spans", {"spans": [["decode", 1.0, 2.0]]}),
        ("spans", {"spans": [["idle: work", 2.0, 3.0]]}),
        ("of no interest", {}),
    )
    (push,) = feed.look(status()).pushes
    assert push == PushSeen(**{k: v for k, v in PUSH.items() if k != "epoch"})
    assert [sample.seconds for sample in feed.look(status()).slow] == [9.0, 0.5]
    assert isinstance(feed.look(status()).slow[0], SampleSeen)
    assert [tuple(span) for span in feed.look(status()).spans["m"]] == [
        ("push", -0.02, 0.0),
        ("decode", 1.0, 2.0),
        ("idle: work", 2.0, 3.0),
    ]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("push", {}),
        ("push", {**PUSH, "wire_s": "long"}),
        ("sample", {**SAMPLE, "versions": [1]}),
        ("spans", {}),
        ("spans", {"spans": [["decode", 1.0]]}),
    ],
)
def test_bad_events_are_counted(kind: str, fields: dict[str, Any]) -> None:
    feed = heard((kind, fields))
    assert feed.bad == 1
    assert (feed.look(status()).pushes, feed.look(status()).samples, feed.look(status()).spans) == (
        [],
        [],
        {},
    )


def test_what_is_kept_is_bounded() -> None:
    feed = heard(*[("push", {**PUSH, "version": i}) for i in range(3 * PUSHES_KEPT)])
    assert len(feed.look(status()).pushes) == PUSHES_KEPT
    assert feed.look(status()).pushes[-1].version == 3 * PUSHES_KEPT - 1
    for number in range(300):
        spans = [["decode", float(i), i + 1.0] for i in range(100)]
        sender = "busy" if number % 2 else f"other-{number}"
        feed.heard(header(sender), Event(kind="spans", fields={"spans": spans}))
    assert len(feed.look(status()).spans["busy"]) == SPANS_KEPT
    assert len(feed.look(status()).spans) <= 256


# -- keys -----------------------------------------------------------------------------------------


def test_actions_have_to_be_confirmed() -> None:
    keys = KeyBindings()
    assert keys.footer == HELP
    assert keys.press("p", paused=False) is None
    assert "pause the run?" in keys.footer
    assert keys.press("n", paused=False) is None
    assert keys.footer == HELP
    keys.press("p", paused=False)
    assert keys.press("y", paused=False) == "pause"
    keys.press("p", paused=True)
    assert keys.press("y", paused=True) == "resume"
    keys.press("d", paused=False)
    assert keys.press("y", paused=False) == "drain"


def test_to_leave_needs_no_confirmation() -> None:
    assert KeyBindings().press("q", paused=False) == "quit"
    assert KeyBindings().press("x", paused=False) is None


def test_keys_of_a_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        with unbuffered(theirs):
            assert next_key(theirs, 0.0) == ""
            os.write(ours, b"p")
            assert next_key(theirs, 10.0) == "p"
    finally:
        os.close(ours)
        os.close(theirs)


# -- small windows --------------------------------------------------------------------------------


def drawn(what: Look, scroll: Scroll, width: int = 80, height: int = 24) -> list[str]:
    """The lines of a terminal of that size."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(screen(what, HELP, scroll))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_at_80_columns_nothing_is_cut_off_and_all_can_be_scrolled_to() -> None:
    members = [
        member("generator-0", activity="waiting for environments", incarnation="abcdef",
               stats={"decoded_per_s": 123456.0, "version": 39.0, "live": 128.0, "active": 512.0},
               shares={"decode": 0.7, "idle: environment": 0.3}),
        member("weight-hub", role="weight_hub", activity="pushing"),
        member("trainer", role="trainer", stats={"step": 40.0, "reward": 0.5, "k3": 1e-12}),
    ]  # fmt: skip
    run_id = "demo-sort-20261123-065808-963a"
    busy, scroll = look(members=members, run_id=run_id), Scroll()
    seen: list[str] = []
    for _ in range(20):
        lines = drawn(busy, scroll)
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(f"umbra {run_id}")
        assert "q leave" in lines[2]
        seen += lines
        scroll.press("pagedown")
    text = "\n".join(seen)
    assert "…" not in text
    for expected in (
        "123,456", "30% (environment)", "weight-hub", "abcdef", "waiting for environments",
        "live 128", "active 512", "k3 1e-12", "tokens/s", "expired_leases 2", "staleness 1.12",
        "reward/mean", "lines 1-20 of",
    ):  # fmt: skip
        assert expected in text, expected


def test_keys_scroll_within_the_text() -> None:
    scroll = Scroll()
    assert scroll.fit(lines=50, room=20) == 0
    for keys, top in (
        (["down", "j", "j"], 3), (["up", "k", "k", "k"], 0), (["pagedown"], 19), ([" ", " "], 30),
        (["b"], 11), (["pageup"], 0), (["end"], 30), (["down"], 30), (["home"], 0),
    ):  # fmt: skip
        assert all(scroll.press(key) for key in keys)
        assert scroll.top == top, keys
    assert not scroll.press("p")
    scroll.press("end")
    assert scroll.fit(lines=25, room=20) == 5  # there is less to show now
    assert scroll.fit(lines=5, room=20) == 0


def test_keys_that_are_pressed_at_once_all_count() -> None:
    ours, theirs = pty.openpty()
    with unbuffered(theirs):
        os.write(ours, b"?q\x1b[B\x1b[6~k")
        pressed = [next_key(theirs, 5.0) for _ in range(5)]
    assert pressed == ["?", "q", "down", "pagedown", "k"]
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("typed", "key"),
    [(b"\x1b[A", "up"), (b"\x1b[6~", "pagedown"), (b"\x1bOF", "end"), (b"\x1b[99~", "\x1b")],
)
def test_keys_that_are_no_characters(typed: bytes, key: str) -> None:
    ours, theirs = pty.openpty()
    with unbuffered(theirs):
        os.write(ours, typed)
        assert next_key(theirs, 5.0) == key
    os.close(ours)
    os.close(theirs)


def test_a_run_that_ends_well_does_not_look_like_a_failure() -> None:
    done = look(version=300, finished=True, ending="run finished: steps reached", state="draining")
    assert "all steps are done, the run ends: run finished" in shown(done)
    assert "ENDING" not in shown(done)
    assert left_text(done.status, lost=True) == "run run-1 has done all its 300 steps and has ended"
    assert "ENDING: by hand" in shown(look(ending="by hand"))
    midway = left_text(look().status, lost=True)
    assert midway.startswith("run run-1 has ended, or cannot be reached: seen at step 40/300")
    assert left_text(look().status, lost=False) == "left run run-1 at step 40/300; it goes on"
