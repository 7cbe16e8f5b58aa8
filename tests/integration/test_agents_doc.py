"""The agent of docs/agents.md, as it stands there, with the real client."""

import re
from pathlib import Path

import pytest
from fakes.agents import AgentWorld
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.trajectories import sample

from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

DOC = Path(__file__).parents[2] / "docs" / "agents.md"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def test_the_agent_of_the_documentation_adds(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
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
