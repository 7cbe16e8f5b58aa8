"""Progress is counted in tokens: an engine that is busy without them is noticed, named, ended."""

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fakes.slowness import limit

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import UmbraError
from umbra.services.generator import activity as stall
from umbra.services.generator.activity import StallWatch
from umbra.services.generator.engines.engine import EngineError


@dataclass
class FakeSession:
    doing: tuple[str, float] = ("decoding", 0.0)
    said: list[str] = field(default_factory=list)

    def leave(self, reason: str) -> None:
        self.said.append(reason)


class Looks(threading.Event):
    """Time that passes by looks: the progress of `session` at each, until there is no more."""

    def __init__(self, session: FakeSession, moved_at: list[float]) -> None:
        super().__init__()
        self._session, self._moved_at = session, moved_at

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1.0
        if not self._moved_at:
            return True
        self._session.doing = (self._session.doing[0], self._moved_at.pop(0))
        return False


def ends(monkeypatch: pytest.MonkeyPatch, moved_at: list[float], loading: int = 0) -> list[str]:
    """Return why it ended, if it did, while there was progress at these times."""
    found: list[str] = []
    monkeypatch.setattr(stall, "end_process", lambda error: found.append(str(error)))
    session = FakeSession()
    watch = StallWatch(cast(Any, session), "vllm", Pace(100.0, LEAST_RATE))
    watch.loading = loading
    monkeypatch.setattr(watch, "_closing", Looks(session, moved_at))
    with watch.watching():
        pass
    assert session.said == [f"failed: {sentence}" for sentence in found]
    return found


def test_seconds_without_a_token_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are: of a process that was stopped there were none."""
    for quiet in ([0.0] * 99, [0.0] * 99 + [1e6] * 100):
        assert ends(monkeypatch, quiet) == []
    assert ends(monkeypatch, [0.0] * 50 + [60.0] * 101) == [
        "the vllm engine is stuck: no token for 100 s while it was decoding (100 s = 10 x "
        "buffer.stall_s)"
    ]


def test_a_load_may_take_longer_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, [0.0] * 149, loading=int(50 * LEAST_RATE)) == []
    (sentence,) = ends(monkeypatch, [0.0] * 150, loading=int(50 * LEAST_RATE))
    assert "no token for 150 s" in sentence


def test_who_is_stuck_leaves_the_run_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, session = threading.Event(), FakeSession()
    found: list[UmbraError] = []

    def end(error: UmbraError) -> None:
        assert session.said, "others have to wait for its leases"
        found.append(error)
        ended.set()

    monkeypatch.setattr(stall, "end_process", end)
    # The interpreter's own watchdog would end the tests if our thread got no core for that long.
    monkeypatch.setattr(stall, "HELD", 10_000.0)
    with StallWatch(cast(Any, session), "torch", Pace(0.2, LEAST_RATE)).watching():
        assert ended.wait(limit(30))
    assert isinstance(found[0], EngineError)
    assert found[0].exit_code == 6
    assert str(found[0]).startswith("the torch engine is stuck: no token for 0 s while it was")
    assert session.said[0] == f"failed: {found[0]}"
