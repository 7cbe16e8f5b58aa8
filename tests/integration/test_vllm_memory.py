"""A vLLM with too little memory for its slots: it preempts, says so, and says how many fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.installed import needs
from fakes.mixed_cache import logprobs_recomputing_cache
from fakes.versions import finish, load, prompt, request, weights
from fakes.vllm_serve import opened, vllm_config

from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.modeling.models import load_model

needs("vllm")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(240),  # starting it takes 20 to 40 s
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

SLOTS = 64  # each gets some hundred tokens, and there is room for two thousand
CONTEXT = 512


def test_it_preempts_and_then_says_how_many_fit(vllm_model_dir: Path) -> None:
    torch.set_num_threads(1)
    model = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    few = {"threads": 1, "slots": SLOTS, "max_context": CONTEXT, "device": "cpu"}
    few["engine_args.kv_cache_memory_bytes"] = 1 << 20
    with opened(vllm_config(vllm_model_dir, **few)) as engine:
        check_preemptions(engine, model)


def check_preemptions(engine: Engine, model: Any) -> None:
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
