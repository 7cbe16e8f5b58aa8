"""Rollouts on real vLLM: interrupted ones go on, here, elsewhere, exactly.

"The next generator" is in turn a vLLM engine of two workers and a torch engine.
"""

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.commands import needs
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

from umbra.services.config import GeneratorConfig, RunConfig
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.vllm.check import stale
from umbra.services.modeling.models import load_model, outline_model

needs("vllm")
pytestmark = [
    pytest.mark.timeout(400),  # starting it takes minutes on a machine that does much else
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest.fixture(scope="module")
def model(vllm_model_dir: Path) -> Any:
    """One that does not say the same again and again when it is greedy."""
    torch.set_num_threads(1)
    model = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def vllm(vllm_model_dir: Path) -> Iterator[Engine]:
    from umbra.services.generator.vllm.options import set_environment

    config = GeneratorConfig(
        engine="vllm", device="cpu", threads=1, slots=8, max_context=CONTEXT, tensor_parallel=2,
        engine_args={"block_size": 32},
    )  # fmt: skip
    set_environment(config)
    from umbra.services.generator.vllm.engine import VllmEngine

    outline = outline_model(vllm_model_dir)
    run = RunConfig(generator=config)
    engine = VllmEngine(vllm_model_dir, outline, run, stop_ids=STOPS, seed=1)
    yield engine
    engine.close()
    del engine
    gc.collect()  # here, where vLLM's warnings about its own sockets are ignored


@pytest.fixture
def next_engine(vllm: Engine, model: Any) -> Callable[[int], Engine]:
    """Return the engine of each version: every other one is a torch engine."""

    def serve(version: int) -> Engine:
        if version % 2:
            return TorchEngine(
                model, stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version, version=version
            )
        assert not vllm.busy
        load(vllm, weights({0: model}, 0), version, "keep")
        return vllm

    return serve


def test_greedy_samples_are_the_same_however_often_they_are_interrupted(
    next_engine: Callable[[int], Engine], vllm_model_dir: Path
) -> None:
    whole = roll(next_engine, vllm_model_dir, 0.0)
    assert [t.turns for t in whole.values()].count(TURNS) > 4
    check_same(roll(next_engine, vllm_model_dir, 0.0, random.Random(0)), whole)


def test_so_they_are_if_engines_of_both_kinds_made_them(
    next_engine: Callable[[int], Engine], model: Any, vllm_model_dir: Path
) -> None:
    check_logprobs(model, roll(next_engine, vllm_model_dir, TEMPERATURE, random.Random(1)))


def test_both_kinds_tell_what_could_have_been_drawn(
    next_engine: Callable[[int], Engine], model: Any, vllm_model_dir: Path
) -> None:
    pieces = roll(next_engine, vllm_model_dir, TEMPERATURE, random.Random(1), top_k=4)
    check_supports(model, pieces)


def test_each_worker_has_what_was_published(vllm: Any, model: Any, vllm_model_dir: Path) -> None:
    other = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    seen: list[dict[str, dict[str, str]]] = []
    for version, published in enumerate((model, other, model)):
        load(vllm, weights({0: published}, 0), version, "keep")
        seen.append(vllm.checksums())
    assert len(seen[0]) == 2
    assert stale(seen[0], *seen) == ()
    kept = {"tp1": next(iter(seen[0].values()))}
    assert stale(kept, kept, kept, kept), "no worker would have loaded anything"
