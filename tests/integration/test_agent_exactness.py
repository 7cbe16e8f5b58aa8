"""An agent's sample goes on token for token on another generator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld, Make, play
from fakes.fixtures import Closes
from fakes.interrupted import TURNS

from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy


@pytest.fixture
def world(tiny_model_dir: Path, closes: Closes) -> Make:
    chat = Chat(load_tokenizer(tiny_model_dir), STOPS)

    def make(engine: TorchEngine, temperature: float, **options: Any) -> AgentWorld:
        sampling = Sampling(temperature=temperature, max_tokens=200)
        settings = RolloutSettings(chat, sampling, engine.max_context)
        return closes(AgentWorld(engine, settings, EnvironmentConfig(kind="agent"), **options))

    return make


def engines(model: Any) -> Callable[[int], TorchEngine]:
    options: Any = {"stop_ids": STOPS, "slots": 2, "max_context": 1024, "seed": 5}
    return lambda attempt: TorchEngine(model, **options, version=attempt)


@pytest.mark.parametrize("cuts", [[9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: Make, cuts: list[int]
) -> None:
    def hints(attempt: int) -> list[str]:
        del attempt
        return [f"go {turn}" for turn in range(TURNS)]

    whole = play(world, engines(model), [], hints)
    pieces = play(world, engines(model), cuts, hints)
    assert len(pieces.spans) == len(cuts) + 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name


def test_an_agent_that_does_not_do_the_same_again_begins_anew(model: Any, world: Make) -> None:
    def hints(attempt: int) -> list[str]:
        return [f"{'come' if attempt == 1 else 'go'} {turn}" for turn in range(TURNS)]

    whole = play(world, engines(model), [], lambda attempt: hints(2))
    again = play(world, engines(model), [9], hints)
    assert [span.version for span in again.spans] == [2]
    assert again.response_ids == whole.response_ids
    assert again.reward == whole.reward
