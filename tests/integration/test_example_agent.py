"""The agent of examples/search, which is written with Anthropic's client, at an endpoint."""

import asyncio
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld, reward
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.trajectories import sample

from umbra.proto.records import Sampling, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer

AGENT = Path(__file__).parents[2] / "examples" / "search" / "anthropic_agent.py"


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def world(tokenizer: Any) -> Iterator[AgentWorld]:
    """An endpoint whose model searches as it should."""
    chosen = settings(Chat(tokenizer, {STOP}), sampling=Sampling(max_tokens=8), max_context=96)
    engine = ScriptedEngine(says(tokenizer, "?mo", "?ka", "zu"))
    made = AgentWorld(engine, chosen, EnvironmentConfig(kind="agent"))
    yield made
    made.close()


def test_it_asks_as_any_model_is_asked(world: AgentWorld, tokenizer: Any, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("mo:ka\nka:zu\n", encoding="utf-8")
    program = runpy.run_path(str(AGENT))
    world.add(sample({"prompt": "mo", "answer": "zu"}))
    work = world.lease()

    async def solve() -> float:
        endpoint = {"base_url": work["base_url"], "api_key": "none"}
        async with program["HTTP"]:
            return await program["solve"](work["row"], endpoint, str(corpus))

    found = asyncio.run(solve())
    assert found == 1.0
    reward(work, found)
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns) == (1.0, 3)
    text = tokenizer.decode(unpack_int32(trajectory.response_ids))
    middle = "<|user|>mo:ka<|assistant|>?ka<|end|>"
    assert text == f"?mo<|end|>{middle}<|user|>ka:zu<|assistant|>zu<|end|>"
