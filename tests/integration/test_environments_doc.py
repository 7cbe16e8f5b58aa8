"""The environment of docs/environments.md and the agent of docs/agents.md, as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.trajectories import sample

from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.pool import InlinePool, open_pool
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.prompts import read_source

DOC = Path(__file__).parents[2] / "docs" / "environments.md"
AGENTS = DOC.with_name("agents.md")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (counting,) = [block for block in blocks if "class Counting" in block]
    (tmp_path / "counting.py").write_text(counting)
    (tmp_path / "scoring.py").write_text(next(b for b in blocks if "def score(" in b))
    monkeypatch.chdir(tmp_path)
    return counting


def test_the_environment_runs_in_a_rollout(code: str, tiny_model_dir: Path) -> None:
    assert len(code.splitlines()) <= 25
    tokenizer = load_tokenizer(tiny_model_dir)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1", "7", "2")]

    def script(ids: Any) -> list[int]:
        said = len(ids) - 1 - max(i for i, token in enumerate(ids) if token == assistant)
        return [*turns[list(ids).count(STOP)], STOP][said:]

    pool = open_pool(EnvironmentConfig(kind="counting:Counting", options={"patience": 3}))
    try:
        runner = RolloutRunner(
            ScriptedEngine(script, max_context=256),
            pool,
            RolloutSettings(Chat(tokenizer, {STOP}), Sampling(max_tokens=8), 256),
        )
        row = {"prompt": "count", "answer": 2}
        runner.add([sample(row)])
        while runner.active:  # each answer of the environment has a deadline
            runner.poll(0.0)
        (trajectory,), failed = runner.results()
    finally:
        pool.close()
    assert not failed
    assert (trajectory.reward, trajectory.turns) == (1.0, 3)
    assert trajectory.reward_parts == {"steps": 2.0}


def test_data_sets_of_reasoning_gym_are_rows_and_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (puzzles,) = [block for block in blocks if "reasoning_gym" in block]
    (tmp_path / "puzzles.py").write_text(puzzles.replace("8192", "3"))
    monkeypatch.chdir(tmp_path)
    pool = InlinePool(load_environment(EnvironmentConfig(kind="reward", reward="puzzles:solved")))
    for prompt in read_source("puzzles:rows"):
        for said in (f" {prompt.row['entry']['answer']}\n", "no idea"):
            pool.play(said, prompt.row, [said])
    rewards = [outcome.value.reward for outcome in pool.collect()]  # type: ignore[union-attr]
    assert rewards[::2] == [1.0] * 3 and max(rewards[1::2]) < 0.5


def test_the_reward_function_scores(code: str) -> None:
    pool = InlinePool(load_environment(EnvironmentConfig(kind="reward", reward="scoring:score")))
    pool.play("s", {"prompt": "p", "word": "sun"}, ["the sun"])
    (outcome,) = pool.collect()
    assert outcome.value is not None, outcome.error
    assert getattr(outcome.value, "reward", None) == 1.0


def test_the_agent_of_the_documentation_adds(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", AGENTS.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "def solve(" in block]
    (tmp_path / "adder.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)
    chosen = settings(Chat(tokenizer, {STOP}), sampling=Sampling(max_tokens=100), max_context=1024)
    engine = ScriptedEngine(says(tokenizer, CALL, CALL, "it is 3"))
    environment = EnvironmentConfig(
        kind="agent", agent="adder:solve", options={"steps": 3}, workers=1, timeout_s=50.0
    )
    world = AgentWorld(engine, chosen, environment)
    try:
        world.add(sample({"prompt": "1+2?", "answer": "3"}))
        trajectory = world.trajectory()
    finally:
        world.close()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
