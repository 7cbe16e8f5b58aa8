"""The packages that environments come from, each as the index has it, in an environment of its own.

None of them is changed; runners in those Python environments play the classes below.
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.library_worlds import LibraryPlay, call, library_python
from fakes.trajectories import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

# verifiers 0.4.0: a taskset.
VERIFIERS = """
import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str = ""


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Echo(vf.Taskset[EchoTask]):
    def load(self):
        return [
            EchoTask(EchoData(idx=n, prompt=f"say {n}", answer=str(n)), self.config.task)
            for n in range(8)
        ]


__all__ = ["Echo"]
"""

# OpenEnv 0.10.0: a server's app.
OPENENV = """
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, secret=3, **kwargs):
        self.secret, self.steps = secret, 0
        return Hint(hint="below 10")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == self.secret:
            return Hint(hint="right", done=True, reward=1.0)
        hint = "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, done=self.steps == 3, reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
"""


def test_a_taskset_for_verifiers(tmp_path: Path, library_play: LibraryPlay) -> None:
    (tmp_path / "theirs.py").write_text(VERIFIERS)
    python = library_python("verifiers")
    words = "-m umbra make-task verifiers:theirs --out data --heldout 1 --environment mine".split()
    said = subprocess.check_output([python, *words, "--prompts", "100"], cwd=tmp_path, text=True)
    assert said == "data: 7 rows in prompts.jsonl, 1 rows in heldout.jsonl\n"
    lines = (tmp_path / "data" / "prompts.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if row["prompt"] in ("say 3", "say 4"))
    assert row["environment"] == "mine"
    world = library_play("verifiers", VERIFIERS, row["prompt"][-1], id="theirs", python=python)
    world.add(sample(row))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns) == (1.0, 1)
    assert trajectory.reward_parts == {"right": 1.0, "length": 1.0}


@pytest.fixture
def game(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of OpenEnv."""
    (tmp_path / "game.py").write_text(OPENENV)
    program = [library_python("openenv"), "-m", "uvicorn", "game:app"]
    with socket.create_server(("127.0.0.1", 0)) as bound:
        fd = bound.fileno()
        server = subprocess.Popen([*program, "--fd", f"{fd}"], cwd=tmp_path, pass_fds=[fd])
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.kill()
        server.wait()


def test_a_server_of_openenv(library_play: LibraryPlay, game: str) -> None:
    turns = [call("act", '{"number": 7}'), call("act", '{"word": 7}'), call("act", '{"number": 3}')]
    world = library_play("openenv", "", *turns, id=game, python=library_python("openenv"))
    world.add(sample({"prompt": "guess", "reset": {"secret": 3}}))
    trajectory = world.trajectory()
    assert trajectory.reward == pytest.approx(0.9)
    assert (trajectory.turns, trajectory.finish_reason) == (3, "stop")
