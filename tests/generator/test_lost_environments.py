"""A conversation whose process has ended is opened again and goes on with the turns that it has."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.slowness import limit
from fakes.trajectories import sample

from umbra.proto.deadline import Deadline
from umbra.proto.records import Sampling, Trajectory
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.pool import ProcessPool
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

pytestmark = pytest.mark.e2e

USER_CODE = """
import os

from umbra.services.environments.protocol import StepResult

class Sums:
    # Three turns, each worth the number that it says.
    def __init__(self):
        self.sum = self.turns = 0
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, response):
        self.sum += int(response)
        self.turns += 1
        return StepResult(reward=float(response), done=self.turns == 3,
                          messages=[{"role": "user", "content": self.said()}])
    def said(self):
        return str(self.sum)

class Moody(Sums):
    def said(self):
        return str(int.from_bytes(os.urandom(4)))
"""


class World:
    """A rollout that says 1, 2 and 4 to an environment in a process."""

    def __init__(self, kind: str, tokenizer: Any) -> None:
        self.engine = ScriptedEngine(says(tokenizer, "1", "2", "4"))
        self.pool = ProcessPool(EnvironmentConfig(kind=kind, workers=1, timeout_s=limit(20.0)))
        chosen = settings(
            Chat(tokenizer, {STOP}), sampling=Sampling(max_tokens=64), max_context=256
        )
        self.runner = RolloutRunner(self.engine, self.pool, chosen)
        self.finished: list[Trajectory] = []

    def lose(self, turn: int) -> Trajectory:
        """Kill the process while the model makes this turn; return what comes of the sample."""
        self.runner.add([sample({"prompt": "1"})])
        self._run(lambda: len(self.engine.requests) == turn)
        (worker,) = self.pool._workers._workers
        worker.process.kill()
        deadline = Deadline(limit(30.0), "nobody notices")
        while self.pool._queue.empty():
            deadline.check()
        self._run(lambda: not self.runner.active)
        return self.finished[0]

    def _run(self, over: Any) -> None:
        deadline = Deadline(limit(30.0), "the samples do not end")
        while not over():
            self.runner.poll(0.0)
            finished, failed = self.runner.results()
            assert not failed
            self.finished += finished
            deadline.check()


@pytest.fixture
def world(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[World]:
    (tmp_path / "losing.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    made = World(f"losing:{request.param}", load_tokenizer(tiny_model_dir))
    with closing(made.pool):
        yield made


@pytest.mark.parametrize("world", ["Sums"], indirect=True)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_nothing_is_generated_twice(world: World, turn: int) -> None:
    made = world.lose(turn)
    assert (made.reward, made.turns, made.finish_reason) == (7.0, 3, "stop")
    assert len(world.engine.requests) == 3


@pytest.mark.parametrize("world", ["Moody"], indirect=True)
def test_one_with_chance_in_it_begins_anew(world: World) -> None:
    made = world.lose(3)
    assert (made.reward, made.turns) == (7.0, 3)
    assert len(world.engine.requests) == 6
