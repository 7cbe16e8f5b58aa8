"""Rollouts and agents on real vLLM: what is interrupted goes on, here, elsewhere, exactly.

"The next generator" is in turn a vLLM engine, a tensor-parallel one, and a torch engine.
"""

import copy
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.agents import AgentWorld, Make, client, play, reward
from fakes.installed import needs
from fakes.interrupted import (
    CONTEXT,
    STOPS,
    TEMPERATURE,
    TOLERANCE,
    TURNS,
    check_logprobs,
    check_same,
    roll,
    teacher_forced,
)
from fakes.trajectories import sample
from fakes.versions import load, weights

from umbra.proto.records import Sampling, unpack_float32, unpack_int32
from umbra.services.config import EnvironmentConfig, GeneratorConfig
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model, load_tokenizer, outline_model

needs("vllm")
pytestmark = [
    pytest.mark.timeout(
        400
    ),  # starting two takes 40 s, and minutes on a machine that does much else
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

VLLMS = 2


@pytest.fixture(scope="module")
def models(vllm_model_dir: Path) -> dict[int, Any]:
    """Four versions of a model that does not say the same again and again when it is greedy."""
    torch.set_num_threads(1)
    model = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    disturb(model, 0.2, seed=3)
    found: dict[int, Any] = {0: model}
    for version in range(1, 4):
        found[version] = copy.deepcopy(model)
        disturb(found[version], 0.03 * version, seed=version)
    return found


@torch.no_grad()
def disturb(model: Any, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def vllms(vllm_model_dir: Path) -> Iterator[list[Engine]]:
    """Two engines, which draw different numbers; the second one is two workers."""
    from umbra.services.generator.vllm.options import set_environment

    configs = [
        GeneratorConfig(
            engine="vllm",
            device="cpu",
            threads=1,
            slots=8,
            max_context=CONTEXT,
            tensor_parallel=1 + index,
            engine_args={"block_size": 32},
        )
        for index in range(VLLMS)
    ]
    set_environment(configs[0])
    from umbra.services.generator.vllm.engine import VllmEngine

    outline = outline_model(vllm_model_dir)
    opened: list[Engine] = [
        VllmEngine(vllm_model_dir, outline, config, dtype="float32", stop_ids=STOPS, seed=seed)
        for seed, config in enumerate(configs)
    ]
    yield opened
    while opened:
        opened.pop().close()
    gc.collect()  # here, where vLLM's warnings about its own sockets are ignored


@pytest.fixture
def next_vllm(vllms: list[Engine], models: dict[int, Any]) -> Callable[[int], Engine]:
    """One vLLM after the other; what it serves gets the version that is asked for."""

    def serve(version: int) -> Engine:
        engine = vllms[version % VLLMS]
        assert not engine.busy
        load(engine, weights(models, 0), version, "keep")
        return engine

    return serve


@pytest.fixture
def next_engine(
    next_vllm: Callable[[int], Engine], models: dict[int, Any]
) -> Callable[[int], Engine]:
    """Every third one is a torch engine."""

    def serve(version: int) -> Engine:
        if version % 3 != 2:
            return next_vllm(version)
        return TorchEngine(
            models[0], stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version, version=version
        )

    return serve


# -- environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0])
def test_greedy_samples_are_the_same_however_often_they_are_interrupted(
    next_engine: Callable[[int], Engine], vllm_model_dir: Path, seed: int
) -> None:
    whole = roll(next_engine, vllm_model_dir, 0.0)
    assert [t.turns for t in whole.values()].count(TURNS) > 4
    check_same(roll(next_engine, vllm_model_dir, 0.0, random.Random(seed)), whole)


def test_logprobs_of_interrupted_samples_are_those_of_one_forward_pass(
    next_vllm: Callable[[int], Engine], models: dict[int, Any], vllm_model_dir: Path
) -> None:
    check_logprobs(models[0], roll(next_vllm, vllm_model_dir, TEMPERATURE, random.Random(0)))


def test_so_they_are_if_engines_of_both_kinds_made_them(
    next_engine: Callable[[int], Engine], models: dict[int, Any], vllm_model_dir: Path
) -> None:
    check_logprobs(models[0], roll(next_engine, vllm_model_dir, TEMPERATURE, random.Random(1)))


# -- agents ---------------------------------------------------------------------------------------


@pytest.fixture
def world(vllm_model_dir: Path) -> Iterator[Make]:
    """Makes an endpoint over an engine."""
    made: list[AgentWorld] = []
    chat = Chat(load_tokenizer(vllm_model_dir), STOPS)

    def make(engine: Engine, temperature: float, **options: Any) -> AgentWorld:
        sampling = Sampling(temperature=temperature, max_tokens=60)
        settings = RolloutSettings(chat, sampling, CONTEXT)
        made.append(AgentWorld(engine, settings, EnvironmentConfig(kind="agent"), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_agent_is_recorded_exactly_while_weights_change(
    next_vllm: Callable[[int], Engine], models: dict[int, Any], world: Make
) -> None:
    """With the openai client; three versions come, each after a token or more."""
    engine = next_vllm(0)
    due = [1, 2, 3]

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= before + due[0]:
            version = due.pop(0)
            runner.take(load(engine, weights(models, version), version, "recompute"))

    before = engine.decoded_tokens
    endpoint = world(engine, TEMPERATURE, between=update)
    endpoint.add(sample({"prompt": "talk"}))
    work = endpoint.lease()
    messages: list[Any] = [{"role": "user", "content": "talk"}]
    logprobs: list[float] = []
    with client(work) as agent:
        for turn in range(TURNS):
            said = agent.chat.completions.create(
                model="m", messages=messages, logprobs=True, temperature=TEMPERATURE
            )
            content = said.choices[0].logprobs
            assert content is not None
            logprobs += [token.logprob for token in content.content or []]
            messages += [said.choices[0].message, {"role": "user", "content": f"go {turn}"}]
            if said.choices[0].finish_reason == "length":
                break  # nothing can follow
    assert reward(work, 0.5)[0] == 200
    trajectory = endpoint.trajectory()
    prompt, tokens = unpack_int32(trajectory.prompt_ids), unpack_int32(trajectory.response_ids)
    mask = torch.tensor(list(trajectory.loss_mask)).bool()
    got = torch.tensor(unpack_float32(trajectory.logprobs))
    spans = trajectory.spans
    assert (trajectory.reward, trajectory.turns) == (0.5, len(messages) // 2)
    assert len(spans) > 1
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(tokens)
    expected = torch.cat(
        [teacher_forced(models[s.version], prompt, tokens)[s.start : s.end] for s in spans]
    )
    assert torch.allclose(got[mask], expected[mask], atol=TOLERANCE)
    assert torch.equal(got[mask], torch.tensor(logprobs))


@pytest.mark.parametrize("cuts", [[4, 8]])
def test_an_agents_sample_goes_on_token_for_token_on_another_generator(
    next_engine: Callable[[int], Engine], world: Make, cuts: list[int]
) -> None:
    def hints(attempt: int) -> list[str]:
        del attempt
        return [f"go {turn}" for turn in range(TURNS)]

    whole = play(world, next_engine, [], hints)
    pieces = play(world, next_engine, cuts, hints)
    assert len(pieces.spans) > 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name
