"""The torch engine and experts on a GPU: logprobs as on the CPU, grouped products as the loop."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.versions import finish, load

from umbra.proto.records import Sampling
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_logprobs_are_those_of_a_forward_pass_on_the_cpu(tiny_model_dir: Path, policy: str) -> None:
    """Scenario: requests of all kinds, and equal weights loaded under way."""
    source = random.Random(0)
    kinds = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.5)]
    asked = [
        EngineRequest(
            f"r{i}",
            [source.randrange(5, 100) for _ in range(source.randint(1, 30))],
            kinds[i % 3],
            source.randint(1, 60),
        )
        for i in range(40)
    ]
    model = load_model(tiny_model_dir, torch.device("cuda", 0), torch.float32)
    reference = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    engine = TorchEngine(model, stop_ids={3}, slots=12, max_context=128, version=0)
    engine.submit(asked)
    outputs: dict[str, EngineOutput] = {}
    polls = 0
    while engine.busy:
        outputs |= {output.request_id: output for output in engine.poll(0.0)}
        polls += 1
        if polls == 20:
            load(engine, reference.named_parameters(), 1, policy)  # type: ignore[arg-type]
    assert len(outputs) == 40
    for request in asked:
        tokens = torch.tensor(outputs[request.request_id].token_ids)
        ids = torch.tensor([[*request.prompt_ids, *tokens.tolist()]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        scaled = logits / (request.sampling.temperature or 1.0)
        expected = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        got = torch.tensor(outputs[request.request_id].logprobs)
        assert torch.allclose(got, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    found: dict[str, torch.Tensor] = {}
    for way in ("eager", "grouped_mm"):
        model: Any = ARCHITECTURES[name].model()
        model.to("cuda", torch.float32)
        model.set_experts_implementation(way)
        ids = torch.arange(5, 45, device="cuda").view(2, 20)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(ids).logits.float().log_softmax(-1)[..., 7].sum()
        loss.backward()
        experts = dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"]
        assert experts.grad is not None
        found[way] = experts.grad
    scale = float(found["eager"].abs().max())
    bound = 1e-4 if dtype == torch.float32 else 0.05
    assert float((found["eager"] - found["grouped_mm"]).abs().max()) < bound * scale


def test_an_engine_tells_its_routing() -> None:
    model: Any = ARCHITECTURES["qwen3-moe"].model()
    model.to("cuda")
    engine = TorchEngine(model, stop_ids=(), slots=4, max_context=64, version=0, tell_routing=True)
    engine.submit(EngineRequest(f"s{n}", [5, 6, 7 + n], Sampling(), 8) for n in range(3))
    for output in finish(engine):
        assert output.routing is not None
        assert len(output.routing.chosen) == (3 + 8 - 1) * output.routing.token_bytes
        assert max(output.routing.chosen) < 4
