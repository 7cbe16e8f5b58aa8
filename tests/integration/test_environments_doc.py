"""The environment of docs/environments.md and the agent of docs/agents.md, as they stand there."""

import re
from pathlib import Path

import pytest
from fakes.fixtures import Closes
from fakes.library_worlds import LibraryPlay, call
from fakes.rollouts import finish, runner_of
from fakes.trajectories import sample

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.pool import InlinePool, open_pool
from umbra.services.modeling.chat import Chat
from umbra.services.prompts import read_source

DOC = Path(__file__).parents[2] / "docs" / "environments.md"


def block(page: Path, part: str) -> str:
    """The only block of code of `page` with `part` in it."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if part in block]
    return found


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_environment_runs_in_a_rollout(chat: Chat, closes: Closes) -> None:
    code = block(DOC, "class Counting")
    assert len(code.splitlines()) <= 25
    Path("counting.py").write_text(code)
    environment = EnvironmentConfig(kind="counting:Counting", options={"patience": 3})
    runner = runner_of(chat, closes(open_pool(environment)), "1", "7", "2", max_context=256)
    runner.add([sample({"prompt": "count", "answer": 2})])
    (trajectory,) = finish(runner, 1_000_000)  # each answer of the environment has a deadline
    assert (trajectory.reward, trajectory.turns) == (1.0, 3)
    assert trajectory.reward_parts == {"steps": 2.0}


def rewards(function: str, *plays: tuple[dict[str, object], str]) -> list[float]:
    """Rewards of `function`, a name in a module of this folder, for pairs of row and answer."""
    config = EnvironmentConfig(kind="reward", reward=function)
    pool = InlinePool(load_environment(config))
    for number, (row, said) in enumerate(plays):
        pool.play(str(number), row, [said])
    return [outcome.value.reward for outcome in pool.collect()]  # type: ignore[union-attr]


def test_data_sets_of_reasoning_gym_are_rows_and_a_reward(own_modules: None) -> None:
    Path("puzzles.py").write_text(block(DOC, "reasoning_gym").replace("8192", "3"))
    rows = [prompt.row for prompt in read_source("puzzles:rows")]
    right = [(row, f" {row['entry']['answer']}\n") for row in rows]
    assert rewards("puzzles:solved", *right) == [1.0] * 3
    assert max(rewards("puzzles:solved", *((row, "no idea") for row in rows))) < 0.5


def test_the_reward_function_scores(own_modules: None) -> None:
    Path("scoring.py").write_text(block(DOC, "def score("))
    assert rewards("scoring:score", ({"prompt": "p", "word": "sun"}, "the sun")) == [1.0]


def test_the_agent_of_the_documentation_adds(library_play: LibraryPlay) -> None:
    code = block(DOC.with_name("agents.md"), "def solve(")
    turns = [call("add", '{"a": 1, "b": 2}')] * 2
    world = library_play(
        "agent", code, *turns, "it is 3", agent="theirs:solve", options={"steps": 3}
    )
    world.add(sample({"prompt": "1+2?", "answer": "3"}))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
