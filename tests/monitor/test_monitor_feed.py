"""Telemetry that a member made up is drawn in an operator's terminal."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.looks import PUSH, ROLLOUT, header, status

from umbra.proto.messages import Event
from umbra.services.monitor.client import Feed


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("push", PUSH | {"receiver": "g\x1b[2J"}),
        ("push", PUSH | {"wire_s": float("inf")}),
        ("rollout", ROLLOUT | {"finish_reason": "stop\nERROR all is lost"}),
        ("rollout", ROLLOUT | {"reward": float("nan")}),
        ("spans", {"spans": [["update", float("-inf"), 2.0]]}),
        ("spans", {"spans": {"a": 1}}),
    ],
)
def test_what_cannot_be_drawn_is_counted_and_left_out(kind: str, fields: dict[str, Any]) -> None:
    feed = Feed()
    feed.receive(header("g"), Event(kind=kind, fields=fields))
    assert feed.invalid == 1
    assert not (
        feed.look(status()).pushes or feed.look(status()).rollouts or feed.look(status()).spans
    )


def test_a_models_words_and_reasons_lose_their_control_characters() -> None:
    feed = Feed()
    said = ROLLOUT | {"prompt": "a\nb\x1b[2J", "response": "c\x07\n"}
    feed.receive(header("g"), Event(kind="rollout", fields=said))
    feed.receive(header("g"), Event(kind="spans", fields={"spans": [["idle: a\nb", 1.0, 2.0]]}))
    (sample,) = feed.look(status()).rollouts
    assert (sample.prompt, sample.response) == ("a\nb [2J", "c \n")
    assert feed.look(status()).spans["g"][0].name == "idle: a b"
    assert not feed.invalid
