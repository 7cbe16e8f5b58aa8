"""Progress is counted in tokens: an engine that is busy without them is noticed, named, ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.loop_bench import Bench, open_bench
from fakes.slowness import limit

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import UmbraError
from umbra.services.generator import activity as stall
from umbra.services.generator.activity import StallWatch, watching
from umbra.services.generator.engines.engine import EngineError


@pytest.fixture
def bench(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Bench]:
    with open_bench(tmp_path, tiny_model_dir) as opened:
        yield opened


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


def test_who_is_stuck_leaves_the_run_and_then_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert "this generator ends unless a token comes" in caplog.text


def test_a_turn_without_a_token_is_no_progress(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = bench.loop._watch
    bench.serve()
    bench.lease("a")
    bench.turns(2)
    assert bench.session.activities[-1] == "decoding"
    monkeypatch.setattr(bench.engine, "poll", lambda _timeout_s: [])
    for _ in range(200):
        bench.now[0] += 2.0
        watch.look()
        bench.turns(1)
    assert bench.session.activities[-1] == "decoding: no progress"
    assert watch.look() >= watch.limit_s
    assert "while it was decoding, with 1 requests in flight" in watch.describe()


def test_the_loop_ends_when_the_receiver_has_failed_whatever_it_waits_for(bench: Bench) -> None:
    """Also while an evaluation wants no other weights than those that are served."""
    bench.serve()
    bench.lease("a", pinned=0)
    bench.turns(1)
    bench.receiver.failure = UmbraError("the receiver of weights failed: KeyError: 7")
    with pytest.raises(UmbraError, match="the receiver of weights failed"):
        bench.turns(1)


def test_whatever_the_loop_raises_is_said_and_what_is_finished_is_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.serve()

    def fail() -> None:
        raise KeyError(7)

    delivered: list[float] = []
    monkeypatch.setattr(bench.loop, "turn", fail)
    monkeypatch.setattr(bench.loop._buffer, "flush", delivered.append)
    with pytest.raises(EngineError, match="the generator failed: KeyError: 7"):
        bench.loop.run()
    assert delivered
