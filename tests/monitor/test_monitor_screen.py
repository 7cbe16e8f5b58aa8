"""The terminal view: what it shows, and what it keeps of what it heard."""

import io
from typing import Any

import pytest
from fakes.looks import PUSH, ROLLOUT, header, heard, look, status
from rich.console import Console

from umbra.proto.messages import Event
from umbra.services.monitor.client import PUSHES_KEPT, SPANS_KEPT, Look, PushEvent
from umbra.services.monitor.view import screen


def shown(what: Look, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(what, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_has_everything() -> None:
    text = shown(look())
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
    ended = shown(look(state="draining", ending="steps reached", finished=True))
    assert "run run-1: finished" in ended and "draining" not in ended


def test_text_of_others_is_never_markup() -> None:
    feed = heard(("rollout", {**ROLLOUT, "response": "[red]x[/nothing]"}))
    assert "[red]x[/nothing]" in shown(feed.look(status()))


def test_events_become_what_is_shown() -> None:
    feed = heard(
        ("push", PUSH),
        ("rollout", ROLLOUT),
        ("spans", {"spans": [["decode", 1.0, 2.0]]}),
        ("spans", {"spans": [["idle: work", 2.0, 3.0]]}),
        ("of no interest", {}),
    )
    (push,) = feed.look(status()).pushes
    assert push == PushEvent(**{k: v for k, v in PUSH.items() if k != "epoch"})
    assert [one.sample for one in feed.look(status()).rollouts] == ["s-9"]
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
        ("rollout", {**ROLLOUT, "pieces": [1]}),
        ("spans", {}),
        ("spans", {"spans": [["decode", 1.0]]}),
    ],
)
def test_bad_events_are_counted(kind: str, fields: dict[str, Any]) -> None:
    feed = heard((kind, fields))
    assert feed.invalid == 1
    seen = feed.look(status())
    assert not (seen.pushes or seen.rollouts or seen.spans)


def test_what_is_kept_is_bounded() -> None:
    feed = heard(*[("push", {**PUSH, "version": i}) for i in range(3 * PUSHES_KEPT)])
    assert len(feed.look(status()).pushes) == PUSHES_KEPT
    assert feed.look(status()).pushes[-1].version == 3 * PUSHES_KEPT - 1
    for number in range(300):
        spans = [["decode", float(i), i + 1.0] for i in range(100)]
        sender = "busy" if number % 2 else f"other-{number}"
        feed.receive(header(sender), Event(kind="spans", fields={"spans": spans}))
    assert len(feed.look(status()).spans["busy"]) == SPANS_KEPT
    assert len(feed.look(status()).spans) <= 256


# -- small windows --------------------------------------------------------------------------------
