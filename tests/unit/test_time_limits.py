"""Time limits of environments: one for each phase, each with the key that sets it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds

from umbra.proto.errors import DeadlineError, UsageError
from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.feasibility import check_feasible
from umbra.services.environments.built_in import Guess
from umbra.services.environments.environment_host import EnvironmentHost
from umbra.services.environments.kinds.trl import trl_program
from umbra.services.environments.pool import EpisodeOutcome, ProcessPool
from umbra.services.environments.protocol import Opening, StepResult, Turn
from umbra.services.environments.rewards import Rewards
from umbra.services.environments.time_limits import TimeLimits
from umbra.services.generator.agents.calls import Call
from umbra.services.generator.agents.session import AgentSession
from umbra.services.http import ApiError
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser, read

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
NEVER = 3000.0


class Played:
    """A pool, and what comes of its plays."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._event = threading.Event()
        self.pool = ProcessPool(config, wake=self._event.set)

    def play(self, key: str, *responses: str, hangs: str = "") -> EpisodeOutcome:
        self.pool.play(key, {"prompt": "p", "hangs": hangs}, list(responses))
        while not (outcomes := self.pool.collect()):
            assert self._event.wait(seconds(60))
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


def test_a_conversation_that_is_played_again_has_time_for_each_call(
    start: Callable[..., Played],
) -> None:
    """1. Its process ends in the third step. 2. Another one plays all of it, and hangs in the next.
    Result: the limit that counts then is that of this step, and the opening's has long passed on.
    """
    player = start("slow_env:Blocking", timeout_s=seconds(2.0))
    assert isinstance(player.play("a").value, Opening)
    assert isinstance(player.play("a", "1").value, StepResult)
    assert "its environment ended" in player.play("a", "1", "end").error
    again = player.play("a", "1", "2").value
    assert isinstance(again, StepResult)
    assert "a step took longer" in player.play("a", "1", "2", "hang").error


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


def test_what_has_no_limit_of_its_own_has_that_of_a_step() -> None:
    limits = TimeLimits.of(EnvironmentConfig(kind="m:C", timeout_s=7.0))
    assert {one.key for one in (limits.opening, limits.step)} == {"environment.timeout_s"}
    assert limits.opening.seconds == 7.0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "m:C", "timeout_s": NEVER}, "takes environments.x.timeout_s = 3000 is given up"),
    ],
)
def test_limits_that_cannot_work_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_feasible(RunConfig(environments=(NamedEnvironment(name="x", **keys),)))


def test_the_host_tells_of_every_call() -> None:
    begun: list[bool] = []
    host = EnvironmentHost(lambda: Guess(tries=4), "guess")
    row = {"prompt": "p", "answer": "5"}
    asyncio.run(host.play("a", row, ["1", "2"], begun.append))
    assert begun == [True, False, False]
    asyncio.run(host.play("a", row, ["1", "2", "3"], begun.append))
    assert begun == [True, False, False, False]


def test_a_program_of_ours_says_when_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def post(_endpoint: Any, path: str, _body: Any) -> tuple[int, Any]:
        asked.append(path)
        message = {"role": "assistant", "content": "7"}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    class Game:
        def reset(self, **_row: Any) -> None:
            """Nothing to say."""

        def get_reward(self) -> float:
            return float(len(asked))

    monkeypatch.setattr("umbra.services.environments.kinds.conversation._post", post)
    play = trl_program(Game, Rewards([]), "game")
    result = asyncio.run(play({"prompt": "p"}, {"base_url": "b", "api_key": "k"}))
    assert asked == ["/chat/completions", "/scoring"] and result.reward == 2.0


def turn() -> Turn:
    said = read(ResponseTemplateParser("told", TOLD, told=True), "", "b", [{}])
    return Turn(said, [1], [0.0], [], 4, True, 0)


def test_a_silent_program_is_given_up_by_the_limit_of_its_phase() -> None:
    config = NamedEnvironment(name="x", kind="agent", timeout_s=10.0)
    session = AgentSession("id", "key", {}, TimeLimits.of(config))
    assert session.deadline == math.inf
    session.begin(1000.0)
    assert (session.deadline, session.limit.key) == (1010.0, "environments.x.timeout_s")
    session.ask(Call([{"role": "user", "content": "a"}]), lambda _: None, lambda _: None)
    session.scoring(1000.0)
    assert session.deadline == math.inf, "the model is at work"
    session.answered(turn(), 2000.0)
    assert (session.deadline, session.limit.key) == (2010.0, "environments.x.timeout_s")
    session.scoring(2005.0)
    assert (session.deadline, session.limit.key) == (2015.0, "environments.x.timeout_s")
    session.rewarded(StepResult(reward=1.0))
    session.scoring(2300.0)
    assert session.deadline == math.inf, "its reward is there"
    session.end(ApiError("over", status=410))
    with pytest.raises(ApiError, match="over"):
        session.scoring(2400.0)
