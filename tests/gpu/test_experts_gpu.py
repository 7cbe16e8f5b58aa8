"""Experts on a GPU: grouped products against the loop, and an engine's routing replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES

from umbra.proto.records import Sampling
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine

pytestmark = pytest.mark.gpu


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
    outputs: list[EngineOutput] = []
    while engine.busy:
        outputs += engine.poll()
    for output in outputs:
        assert output.routing is not None
        assert len(output.routing.chosen) == (3 + 8 - 1) * output.routing.token_bytes
        assert max(output.routing.chosen) < 4
