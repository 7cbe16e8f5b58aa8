"""The torch engine on a GPU: tokens and logprobs as on the CPU."""

import random
from pathlib import Path

import pytest
import torch
from fakes.versions import load

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
