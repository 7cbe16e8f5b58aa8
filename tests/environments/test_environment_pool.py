"""User code in processes of its own: raising, hanging or dying costs one sample."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import Closes
from fakes.players import Player
from fakes.slowness import limit, seconds

from umbra.proto.errors import DeadlineError, UsageError
from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.environments.pool import ProcessPool, open_pool
from umbra.services.environments.protocol import EpisodeOutcome, Lost, Opening, StepResult

pytestmark = pytest.mark.e2e

USER_CODE = """
import asyncio, os, signal, sys, time

from umbra.services.environments.protocol import StepResult

def score(prompt, completion, row):
    if completion == "raise":
        raise KeyError("gold")
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "exit":
        sys.exit(3)
    return "1.0" if completion == "text" else 0.5

class Count:
    # Answers with the sum of all turns; which process it is in does not matter.
    def __init__(self):
        self.sum = 0
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, response):
        if response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.sum += int(response)
        return StepResult(reward=1.0, done=False,
                          messages=[{"role": "user", "content": str(self.sum)}])

MEETING = {"n": 0}

class Meeting:
    # A turn ends when as many samples have come as the row says.
    def reset(self, row):
        self.row = row
        return []
    async def step(self, response):
        if response == "die":
            os._exit(1)
        if "flag" in self.row:
            if not os.path.exists(self.row["flag"]):
                open(self.row["flag"], "w").close()
                await asyncio.sleep(600)
            return StepResult(reward=2.0)
        MEETING["n"] += 1
        while MEETING["n"] < self.row["size"]:
            await asyncio.sleep(0.001)
        return StepResult(reward=2.0)

class Waiting:
    async def reset(self, row):
        if row["hangs"] == "reset":
            await asyncio.Event().wait()
        return [{"role": "user", "content": "go"}]

    async def step(self, response):
        if response == "hang":
            await asyncio.Event().wait()
        return self.answer(response)

    def answer(self, response):
        return StepResult(done=False, messages=[{"role": "user", "content": str(response)}])

class Blocking(Waiting):
    def reset(self, row):
        if row["hangs"] == "reset":
            time.sleep(1000)
        return [{"role": "user", "content": "go"}]

    def step(self, response):
        if response == "hang":
            time.sleep(1000)
        return self.answer(response)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture
def start(module: str, closes: Closes) -> Callable[..., Player]:

    def make(kind: str, **changes: Any) -> Player:
        what = {"kind": f"{module}:{kind}"}
        if kind == "score":
            what = {"kind": "reward", "reward": f"{module}:score"}
        values: dict[str, Any] = {"timeout_s": 20.0, "workers": 1, **what, **changes}
        return closes(Player(EnvironmentConfig(**values)))

    return make


def text(outcome: EpisodeOutcome) -> str:
    assert isinstance(outcome.value, StepResult), outcome.error
    return outcome.value.messages[0]["content"]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("raise", "raised KeyError: 'gold'"),
        ("exit", "raised SystemExit: 3"),
        ("text", "returned '1.0', which is not a finite number"),
        ("die", "the process of its environment ended (killed by SIGKILL)"),
        ("hang", "its reward took longer than environment.timeout_s = "),
    ],
)
def test_a_bad_reward_costs_its_sample(start: Callable[..., Player], said: str, error: str) -> None:
    # One that hangs ends the test after the limit, in which the good ones have to be scored.
    player = start("score", timeout_s=seconds(1.0) if said == "hang" else 20.0)
    for name, completion in (("bad", said), ("good", "fine"), ("better", "fine")):
        player.pool.play(name, {"prompt": "p"}, [completion])
    outcomes = player.outcomes(3)
    assert error in outcomes["bad"].error
    assert outcomes["good"].value == outcomes["better"].value == StepResult(reward=0.5)


def test_async_environments_share_a_process(start: Callable[..., Player]) -> None:
    player = start("Meeting")
    for index in range(20):
        player.pool.play(str(index), {"size": 20}, ["x"])
    assert len(player.outcomes(20)) == 20


def test_one_of_many_in_a_process_kills_it(start: Callable[..., Player], tmp_path: Path) -> None:
    """The others are sent again; the one that does it twice, alone, is the one."""
    player = start("Meeting")
    player.pool.play("hangs once", {"flag": str(tmp_path / "flag")}, ["x"])
    player.pool.play("bad", {"size": 1}, ["die"])
    player.pool.play("late", {"size": 1}, ["x"])
    outcomes = player.outcomes(3)
    assert "ended (exit code 1)" in outcomes["bad"].error
    assert outcomes["hangs once"].value == outcomes["late"].value == StepResult(reward=2.0)


def test_conversations_are_lost_with_their_process(start: Callable[..., Player]) -> None:
    player = start("Count")
    player.play("a")
    assert text(player.play("a", "1")) == "1"
    player.pool.play("b", {"prompt": "p"}, ["die"])
    outcomes = player.outcomes(2)
    assert "killed by SIGKILL" in outcomes["b"].error
    assert outcomes["a"].value == Lost()
    player.pool.play("a", {"prompt": "p"}, ["2"])  # was on its way
    assert isinstance(player.play("a").value, Opening)
    assert text(player.play("a", "5")) == "5"
    assert text(player.play("a", "2")) == "7"


def test_a_module_that_ends_the_process_is_named(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}_exits.py").write_text("import os; os._exit(7)")
    with pytest.raises(UsageError, match=r"ended \(exit code 7\) when it was started"):
        open_pool(EnvironmentConfig(kind="reward", reward=f"{module}_exits:score"))


@pytest.mark.parametrize("kind", ["Waiting", "Blocking"])
def test_opening_and_step_are_limited(start: Callable[..., Player], module: str, kind: str) -> None:
    """The sentence names phase, seconds and key."""
    limit_s = seconds(0.5)  # in which the next one has to be opened
    player = start(kind, timeout_s=limit_s)
    told = f"took longer than environment.timeout_s = {limit_s:g} s"
    opened = player.play("a", hangs="reset").error
    assert opened == f"environment {module}:{kind}: the opening (reset) {told}"
    assert isinstance(player.play("b", hangs="").value, Opening)
    step = player.play("b", "hang", hangs="").error
    assert step == f"environment {module}:{kind}: a step {told}"


def test_a_process_that_does_not_start_names_its_key(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_hangs.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(DeadlineError, match=r"after environments\.slow\.setup_s = 0\.5 s"):
        ProcessPool(NamedEnvironment(name="slow", kind=f"{module}_hangs:A", setup_s=0.5))


OWNER = """
import asyncio, os, sys
from umbra.services.environments.worker_pool import WorkerPool
from umbra.services.config import EnvironmentConfig

config = EnvironmentConfig(kind="reward", reward=sys.argv[1], timeout_s=20.0, workers=1)
asyncio.run(WorkerPool(config, print).start())
"""


@pytest.mark.fault
def test_a_process_that_is_still_importing_dies_with_its_owner(tmp_path: Path) -> None:
    """Scenario: the user's module hangs while it is imported; its owner is killed."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "hanging.py").write_text(
        f"import os, time\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", OWNER, "hanging:score"], cwd=tmp_path)
    worker = os.pidfd_open(int(fifo.read_text()))
    owner.kill()
    owner.wait()
    ended, _, _ = select.select([worker], [], [], limit(30))
    os.close(worker)
    assert ended, "the process outlived its owner"
