"""Progress is counted in tokens: an engine that is busy without them is noticed, named, ended."""

import threading
from typing import Any, cast

import pytest
from fakes.slowness import limit

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import UmbraError
from umbra.services.generator import activity as stall
from umbra.services.generator.activity import StallWatch, watching
from umbra.services.generator.engines.engine import EngineError


def watched(limit_s: float = 100.0) -> tuple[StallWatch, list[float]]:
    now = [0.0]
    return StallWatch("vllm", Pace(limit_s, LEAST_RATE), clock=lambda: now[0]), now


def test_seconds_without_a_token_are_counted() -> None:
    watch, now = watched()
    watch.waits("decoding", 12)
    for _ in range(100):
        now[0] += watch.look_s
        watch.look()
    assert watch.look() == pytest.approx(100.0)
    assert watch.describe() == (
        "the vllm engine is stuck: no token for 100 s while it was decoding, with 12 requests in "
        "flight (100 s = 10 x buffer.stall_s)"
    )
    watch.moved()
    assert watch.look() == 0.0


def test_a_process_that_was_stopped_has_not_been_stuck() -> None:
    watch, now = watched()
    watch.look()
    now[0] += 10_000.0
    assert watch.look() == 2 * watch.look_s


class Leaving:
    def __init__(self) -> None:
        self.said: list[str] = []

    def leave(self, reason: str) -> None:
        self.said.append(reason)


def test_who_is_stuck_leaves_the_run_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, session = threading.Event(), Leaving()
    found: list[UmbraError] = []

    def end(error: UmbraError) -> None:
        assert session.said, "others have to wait for its leases"
        found.append(error)
        ended.set()

    monkeypatch.setattr(stall, "end_process", end)
    # The interpreter's own watchdog would end the tests if our thread got no core for that long.
    monkeypatch.setattr(stall, "HELD", 10_000.0)
    watch = StallWatch("torch", Pace(0.2, LEAST_RATE))
    with watching(watch, cast(Any, session)):
        assert ended.wait(limit(30))
    assert isinstance(found[0], EngineError)
    assert found[0].exit_code == 6
    assert str(found[0]).startswith("the torch engine is stuck: no token for 0 s while it was")
    assert session.said[0] == f"failed: {found[0]}"
