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
from fakes.installed import needs
from fakes.interrupted import (
    CONTEXT,
    STOPS,
    TEMPERATURE,
    TURNS,
    check_logprobs,
    check_same,
    check_supports,
    roll,
)
from fakes.versions import load, weights

from umbra.services.config import GeneratorConfig
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model, outline_model

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


def test_greedy_samples_are_the_same_however_often_they_are_interrupted(
    next_engine: Callable[[int], Engine], vllm_model_dir: Path
) -> None:
    whole = roll(next_engine, vllm_model_dir, 0.0)
    assert [t.turns for t in whole.values()].count(TURNS) > 4
    check_same(roll(next_engine, vllm_model_dir, 0.0, random.Random(0)), whole)


def test_so_they_are_if_engines_of_both_kinds_made_them(
    next_engine: Callable[[int], Engine], models: dict[int, Any], vllm_model_dir: Path
) -> None:
    check_logprobs(models[0], roll(next_engine, vllm_model_dir, TEMPERATURE, random.Random(1)))


def test_both_kinds_tell_what_could_have_been_drawn(
    next_engine: Callable[[int], Engine], models: dict[int, Any], vllm_model_dir: Path
) -> None:
    pieces = roll(next_engine, vllm_model_dir, TEMPERATURE, random.Random(1), top_k=4)
    check_supports(models[0], pieces)


# -- agents ---------------------------------------------------------------------------------------
