"""Real vLLM on the CPU with versions that are an adapter alone, and with too little memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.adapters import config_of, publish, trained
from fakes.commands import needs
from fakes.mixed_cache import logprobs_keeping_cache, logprobs_recomputing_cache
from fakes.versions import decode, finish, prompt, request, weights, worst
from fakes.versions import load as load_weights
from fakes.vllm_models import write_model
from fakes.vllm_serve import opened
from fakes.vllm_serve import vllm_config as plain_config

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.generator.engines.opening import open_engine
from umbra.services.generator.vllm import options as vllm_options
from umbra.services.modeling.models import load_model
from umbra.services.trainer.learner import Learner

needs("vllm")
pytestmark = [
    pytest.mark.timeout(900),  # starting it takes 20 to 40 s on a machine with nothing else to do
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

SLOTS = 16
VERSIONS = 3
TOLERANCE = 2e-4


def vllm_config(directory: Path, *more: str) -> RunConfig:
    return config_of(
        directory,
        "weight_hub.dtype=float32",
        "generator.engine=vllm",
        f"generator.slots={SLOTS}",
        "generator.max_context=192",
        "generator.engine_args.block_size=32",
        *more,
    )


def versions_of(config: RunConfig) -> dict[int, Learner]:
    torch.set_num_threads(1)  # the engine has the other core
    return {version: trained(config, version) for version in range(VERSIONS)}


def load(engine: Engine, config: RunConfig, learner: Learner, version: int, policy: Any) -> None:
    manifest, slot = publish(learner, config)
    engine.load(manifest, slot, version, policy)


def in_flight(
    engine: Engine, config: RunConfig, learners: dict[int, Learner], policy: str
) -> tuple[dict[int, Any], dict[int, EngineOutput]]:
    load(engine, config, learners[0], 0, "keep")
    engine.submit([request(i, 100) for i in range(SLOTS + 8)])
    outputs: list[EngineOutput] = []
    for version in range(1, VERSIONS):
        outputs += decode(engine, SLOTS * 12)
        load(engine, config, learners[version], version, policy)
    outputs += finish(engine)
    assert len(outputs) == SLOTS + 8
    assert sum(len(o.spans) == VERSIONS for o in outputs) >= 4
    models = {version: learner.model for version, learner in learners.items()}
    return models, {int(o.request_id[1:]): o for o in outputs}


def test_new_adapters_in_flight(vllm_model_dir: Path) -> None:
    """Each token's logprob is the trainer's with the adapter of the token's version."""
    config = vllm_config(vllm_model_dir)
    learners = versions_of(config)
    with opened(config) as engine:
        models, outputs = in_flight(engine, config, learners, "keep")
        assert worst(logprobs_keeping_cache, models, outputs) < TOLERANCE
        assert worst(logprobs_recomputing_cache, models, outputs) > 100 * TOLERANCE
        models, outputs = in_flight(engine, config, learners, "recompute")
        assert worst(logprobs_recomputing_cache, models, outputs) < TOLERANCE


@pytest.mark.real
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2.5", "qwen3"])
def test_architectures_with_adapters(name: str, workers: int, tmp_path: Path) -> None:
    """Of several workers each has its part of the factors."""
    parallel = f"generator.tensor_parallel={workers}"
    config = vllm_config(write_model(name, tmp_path / "model"), parallel)
    learners = versions_of(config)
    with opened(config) as engine:
        models, outputs = in_flight(engine, config, learners, "recompute")
        assert worst(logprobs_recomputing_cache, models, outputs) < TOLERANCE


@pytest.mark.real
def test_layers_that_vllm_has_no_adapters_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, which the default of trainer.lora_targets has: refused by name at the start."""
    monkeypatch.setattr(vllm_options, "_ADAPTERS", ("qwen3_moe",))
    config = vllm_config(write_model("qwen3-moe", tmp_path / "model"))
    said = r"vLLM has no adapters for model\.layers\.0\.mlp\.experts"
    with pytest.raises(UsageError, match=said):
        open_engine(config, "generator-0")
    gc.collect()


@pytest.mark.real
def test_with_too_little_memory_it_preempts(vllm_model_dir: Path) -> None:
    """Each slot gets some hundred tokens, and there is room for two thousand."""
    torch.set_num_threads(1)
    model, slots = load_model(vllm_model_dir, torch.device("cpu"), torch.float32), 64
    few = {"threads": 1, "slots": slots, "max_context": 512, "device": "cpu"}
    few["engine_args.kv_cache_memory_bytes"] = 1 << 20
    with opened(plain_config(vllm_model_dir, **few)) as engine:
        load_weights(engine, weights({0: model}, 0), 0, "keep")
        outputs: list[EngineOutput] = []
        for _ in range(2):
            engine.submit([request(i, 400) for i in range(slots)])
            while engine.busy:
                outputs += engine.poll(0.05)
        assert len(outputs) == 2 * slots
        capacity = engine._llm.vllm_config.cache_config.kv_cache_size_tokens  # pyright: ignore
    assert sum(len(output.token_ids) for output in outputs[:slots]) > 2 * capacity
    for output in outputs[-4:]:
        again = logprobs_recomputing_cache({0: model}, prompt(int(output.request_id[1:])), output)
        assert output.logprobs == pytest.approx(again, abs=TOLERANCE)
