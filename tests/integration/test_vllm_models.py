"""Real vLLM on the CPU besides `test_engines.py`: two workers, adapters, each architecture."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.adapters import config_of, publish, trained
from fakes.architectures import ARCHITECTURES
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
from fakes.versions import (
    decode,
    finish,
    load,
    logprobs_keeping_cache,
    logprobs_recomputing_cache,
    request,
    weights,
    worst,
)
from fakes.vllm_models import BOUND, examine, quantized, recorded, write_model
from fakes.vllm_serve import opened, vllm_config

from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.vllm import options as vllm_options
from umbra.services.generator.vllm.check import stale
from umbra.services.modeling.models import load_model
from umbra.services.trainer.learner import Learner

needs("vllm")
pytestmark = [
    pytest.mark.timeout(900),  # starting it takes 20 to 40 s on a machine with nothing else to do
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
NEEDS_AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="this processor has no AMX, for which vLLM has its one kernel of int8 experts",
)
SLOTS = 16
VERSIONS = 3
TOLERANCE = 2e-4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # the engine has the other core


def test_interrupted_rollouts_go_on_exactly_on_engines_of_both_kinds(vllm_model_dir: Path) -> None:
    """The next generator is in turn a vLLM of two workers and a torch engine.

    Result: greedy samples are the same however often they are interrupted, logprobs and supports of
    others are a trainer's, and each worker has what was published.
    """
    original = load_model(vllm_model_dir, CPU, torch.float32)
    model: Any = load_model(vllm_model_dir, CPU, torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():  # one that does not say the same again and again when it is greedy
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    sizes = {"threads": 1, "slots": 8, "max_context": CONTEXT, "tensor_parallel": 2}
    with opened(vllm_config(vllm_model_dir, device="cpu", **sizes)) as found:
        vllm: Any = found
        vllm._stop_ids = list(STOPS)

        def next_engine(version: int) -> Engine:
            if version % 2:
                return TorchEngine(
                    model, stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version,
                    version=version,
                )  # fmt: skip
            assert not vllm.busy
            load(vllm, weights({0: model}, 0), version, "keep")
            return vllm

        def interrupted(seed: int, temperature: float = TEMPERATURE, top_k: int = 0) -> Any:
            return roll(next_engine, vllm_model_dir, temperature, random.Random(seed), top_k=top_k)

        whole = roll(next_engine, vllm_model_dir, 0.0)
        assert [t.turns for t in whole.values()].count(TURNS) > 4
        check_same(interrupted(0, temperature=0.0), whole)
        check_logprobs(model, interrupted(1))
        check_supports(model, interrupted(1, top_k=4))
        seen: list[dict[str, dict[str, str]]] = []
        for version, published in enumerate((model, original, model)):
            load(vllm, weights({0: published}, 0), version, "keep")
            seen.append(vllm.checksums())
        assert len(seen[0]) == 2
        assert stale(seen[0], *seen) == ()
        kept = {"tp1": next(iter(seen[0].values()))}
        assert stale(kept, kept, kept, kept), "no worker would have loaded anything"


def adapter_config(directory: Path, *more: str) -> RunConfig:
    settings = ("engine=vllm", f"slots={SLOTS}", "max_context=192", "engine_args.block_size=32")
    keys = [f"generator.{one}" for one in (*settings, *more)]
    return config_of(directory, "weight_hub.dtype=float32", *keys)


def in_flight(
    engine: Engine, config: RunConfig, learners: list[Learner], policy: Any
) -> dict[int, EngineOutput]:
    """Return outputs of requests during which each learner's adapter is published."""
    outputs: list[EngineOutput] = []
    for version, learner in enumerate(learners):
        if version:
            outputs += decode(engine, SLOTS * 12)
        engine.load(*publish(learner, config), version, policy)
        if not version:
            engine.submit([request(i, 100) for i in range(SLOTS + 8)])
    outputs += finish(engine)
    assert len(outputs) == SLOTS + 8
    assert sum(len(o.spans) == VERSIONS for o in outputs) >= 4
    return {int(o.request_id[1:]): o for o in outputs}


def check_adapters(config: RunConfig) -> None:
    """Each token's logprob is the trainer's with the adapter of the token's version."""
    learners = [trained(config, version) for version in range(VERSIONS)]
    models = {version: learner.model for version, learner in enumerate(learners)}
    with opened(config) as engine:
        outputs = in_flight(engine, config, learners, "keep")
        assert worst(logprobs_keeping_cache, models, outputs) < TOLERANCE
        assert worst(logprobs_recomputing_cache, models, outputs) > 100 * TOLERANCE
        outputs = in_flight(engine, config, learners, "recompute")
        assert worst(logprobs_recomputing_cache, models, outputs) < TOLERANCE


def test_new_adapters_in_flight(vllm_model_dir: Path) -> None:
    check_adapters(adapter_config(vllm_model_dir))


@pytest.mark.real
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2.5", "qwen3"])
def test_architectures_with_adapters(name: str, workers: int, tmp_path: Path) -> None:
    """Of several workers each has its part of the factors."""
    model = write_model(name, tmp_path / "model")
    check_adapters(adapter_config(model, f"tensor_parallel={workers}"))


# -- vLLM after a publish = vLLM from disk = Transformers ------------------------------------------


def test_every_architecture_is_in_the_record() -> None:
    assert recorded().keys() == ARCHITECTURES.keys()


@pytest.mark.real
@pytest.mark.parametrize("name", recorded())
def test_vllm_serves_what_is_published(name: str, tmp_path: Path) -> None:
    found = examine(name, tmp_path)
    expected = recorded()[name]
    assert found["outcome"] == expected["outcome"], found
    assert found.get("why") == expected.get("why")


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3", "fp8_per_channel"),
        pytest.param("qwen3-moe", "int8_per_channel_weight_only", marks=NEEDS_AMX),
    ],
)
def test_what_is_quantized_survives_new_weights(name: str, method: str, tmp_path: Path) -> None:
    """A publish takes logprobs as far from Transformers' as the same weights from disk do."""
    found, changed_from_disk = quantized(name, method, tmp_path)
    assert found.from_disk > BOUND  # it is quantized
    assert not found.stale
    assert found.same < 2 * found.from_disk
    assert found.changed < 2 * changed_from_disk


@pytest.mark.real
def test_a_load_that_does_not_reach_all_weights_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's gpt_oss says that it loaded its experts and sinks, and did not."""
    monkeypatch.setattr(vllm_options, "check_served", lambda *_: None)
    found = examine("gpt-oss", tmp_path)
    assert found["outcome"] == "engine"
    assert "vLLM found no weights for model.layers.0.attn.sinks" in found["why"]
