"""A vLLM with too little memory for its slots: it preempts, says so, and says how many fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.installed import needs
from fakes.mixed_cache import logprobs_recomputing_cache
from fakes.versions import finish, load, prompt, request, weights

from umbra.services.config.loader import load_config
from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.generator.engines.opening import open_engine
from umbra.services.modeling.models import load_model

needs("vllm")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(240),  # starting it takes 20 to 40 s
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

SLOTS = 64  # each gets some hundred tokens, and there is room for two thousand
CONTEXT = 512


@pytest.fixture(scope="module")
def model(vllm_model_dir: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(vllm_model_dir, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def engine(vllm_model_dir: Path) -> Iterator[Engine]:
    overrides = [
        f"model.path={vllm_model_dir}",
        "weight_hub.dtype=float32",
        "generator.engine=vllm",
        "generator.device=cpu",
        "generator.threads=1",
        f"generator.slots={SLOTS}",
        f"generator.max_context={CONTEXT}",
        f"generator.engine_args.kv_cache_memory_bytes={1 << 20}",
        "generator.engine_args.block_size=32",
    ]
    opened = open_engine(load_config(overrides=overrides, environ={}), "generator-0")
    yield opened.engine
    opened.engine.close()


def test_it_preempts_and_then_says_how_many_fit(engine: Engine, model: Any) -> None:
    load(engine, weights({0: model}, 0), 0, "keep")
    at_first = engine.fits
    assert 1 <= at_first < SLOTS, "each may get as long as the context"
    outputs: list[EngineOutput] = []
    usage = 0.0
    for _ in range(2):
        engine.submit([request(i, 400) for i in range(SLOTS)])
        while engine.busy:
            outputs += engine.poll(0.05)
            usage = max(usage, engine.cache.usage)
    assert len(outputs) == 2 * SLOTS
    assert engine.cache.preemptions > 0
    assert usage > 0.9
    assert engine.cache.usage == 0.0
    assert at_first <= engine.fits < SLOTS
    assert not finish(engine)
    for output in outputs[-4:]:
        again = logprobs_recomputing_cache({0: model}, prompt(int(output.request_id[1:])), output)
        assert output.logprobs == pytest.approx(again, abs=2e-4)
