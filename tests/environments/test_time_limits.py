"""Time limits of environments: one for each phase, each with the key that sets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import limit, seconds

from umbra.proto.errors import DeadlineError
from umbra.services.config import NamedEnvironment
from umbra.services.environments.pool import ProcessPool
from umbra.services.environments.protocol import EpisodeOutcome, Opening

CODE = """
import asyncio, os, time

class Waiting:
    async def reset(self, row):
        if row["hangs"] == "reset":
            await asyncio.Event().wait()
        return [{"role": "user", "content": "go"}]

    async def step(self, response):
        if response == "hang":
            await asyncio.Event().wait()
        return {}["raise"] if response == "raise" else self.answer(response)

    def answer(self, response):
        from umbra.services.environments.protocol import StepResult
        return StepResult(done=False, messages=[{"role": "user", "content": str(response)}])

class Blocking(Waiting):
    def reset(self, row):
        if row["hangs"] == "reset":
            time.sleep(1000)
        return [{"role": "user", "content": "go"}]

    def step(self, response):
        if response == "hang":
            time.sleep(1000)
        if response == "end" and not os.path.exists("ended"):
            open("ended", "w").close()
            os._exit(3)
        return self.answer(response)

def judge(prompt, completion, row):
    time.sleep(1000)
"""


class Played:
    """A pool, and what comes of its plays."""

    def __init__(self, config: NamedEnvironment) -> None:
        self._event = threading.Event()
        self.pool = ProcessPool(config, wake=self._event.set)

    def play(self, key: str, *responses: str, hangs: str = "") -> EpisodeOutcome:
        self.pool.play(key, {"prompt": "p", "hangs": hangs}, list(responses))
        while not (outcomes := self.pool.collect()):
            assert self._event.wait(limit(60))
            self._event.clear()
        return outcomes[0]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Played]]:
    (tmp_path / "slow_env.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    started: list[Played] = []

    def make(kind: str, **keys: Any) -> Played:
        values: dict[str, Any] = {"name": "slow", "kind": kind, "workers": 1, **keys}
        started.append(Played(NamedEnvironment(**values)))
        return started[-1]

    yield make
    for one in started:
        one.pool.close()


@pytest.mark.parametrize("kind", ["Waiting", "Blocking"])
def test_opening_and_step_have_a_limit(start: Callable[..., Played], kind: str) -> None:
    """The sentence names phase, seconds and key."""
    limit_s = seconds(0.5)  # in which the next one has to be opened
    one = start(f"slow_env:{kind}", timeout_s=limit_s)
    told = f"took longer than environments.slow.timeout_s = {limit_s:g} s"
    assert one.play("a", hangs="reset").error == (
        f"environment slow_env:{kind}: the opening (reset) {told}"
    )
    assert isinstance(one.play("b").value, Opening)
    assert one.play("b", "hang").error == f"environment slow_env:{kind}: a step {told}"
    # Played from its beginning in one go: the step is known to be the one that hangs.
    assert "a step took longer" in one.play("c", "hang").error


def test_a_reward_has_its_own_limit(start: Callable[..., Played]) -> None:
    player = start("reward", reward="slow_env:judge", timeout_s=0.5)
    assert player.play("a", "x").error == (
        "environment slow_env:judge: its reward took longer than "
        "environments.slow.timeout_s = 0.5 s"
    )


def test_a_process_that_does_not_start_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_env.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeadlineError, match=r"after environments\.slow\.setup_s = 0\.5 s"):
        ProcessPool(NamedEnvironment(name="slow", kind="hanging_env:A", setup_s=0.5))
