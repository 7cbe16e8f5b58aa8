"""Which experts an engine chose travels with its trajectories, and the trainer chooses the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.trajectories import trajectory
from torch import Tensor

from umbra.proto.records import Sampling, Trajectory
from umbra.services.generator.engine import EngineOutput, EngineRequest
from umbra.services.generator.torch_engine import TorchEngine
from umbra.services.modeling.experts import Routers, chosen_experts
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.runtime.trajectories import RunFacts, find_fault
from umbra.services.trainer.batch import TrainBatch, make_batch

MIXTURES = ("qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe", "gpt-oss", "olmoe")
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]


def generated(
    model: Any, *, samples: int = 2, tokens: int = 6, **engine: Any
) -> list[EngineOutput]:
    """Answers of a torch engine that tells its routing: `samples` to each of `PROMPTS`."""
    made = TorchEngine(
        model, stop_ids=(), slots=8, max_context=64, version=0, tell_routing=True, **engine
    )
    made.submit(
        EngineRequest(f"{number}-{sample}", prompt, Sampling(), tokens + number - sample)
        for number, prompt in enumerate(PROMPTS)
        for sample in range(samples)
    )
    outputs: list[EngineOutput] = []
    while made.busy:
        outputs += made.poll()
    return sorted(outputs, key=lambda output: output.request_id)


def recorded(outputs: list[EngineOutput]) -> list[Trajectory]:
    """These answers as trajectories."""
    return [
        trajectory(
            PROMPTS[int(output.request_id[0])],
            output.token_ids,
            output.logprobs,
            sample_id=output.request_id,
            group_id=output.request_id[0],
            routing=output.routing,
        )
        for output in outputs
    ]


def logprobs(scorer: Scorer, batch: TrainBatch, *, share: bool = True, tokens: int = 64) -> Tensor:
    """Of the learned tokens of `batch`, with gradients, [M]."""
    found = torch.zeros(len(batch.behaviour))
    for micro in pack(batch.tokens, pack_tokens=tokens, micro_tokens=256, share_prompts=share):
        part, _ = scorer(micro, batch.temperature[micro.source], with_entropy=False)
        found = found.index_put((micro.source,), part)
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_engine_tells_the_experts_that_its_routers_choose(name: str) -> None:
    model = ARCHITECTURES[name].model()
    outputs = generated(model)
    routers = Routers.of(model)
    assert routers is not None
    for made in recorded(outputs):
        assert find_fault(made, RunFacts(routing=True, routers=routers.kind)) is None
        ids = [*memoryview(made.prompt_ids).cast("i"), *memoryview(made.response_ids).cast("i")]
        routers.noted = []
        with torch.no_grad():
            model(torch.tensor([ids[:-1]]))
        alone = torch.stack(routers.noted, 1)
        assert torch.equal(
            torch.from_numpy(chosen_experts(made).astype("int64")).sort(-1)[0], alone.sort(-1)[0]
        )


@pytest.mark.parametrize("name", MIXTURES)
def test_replay_of_the_own_choice_changes_nothing(name: str) -> None:
    made = recorded(generated(ARCHITECTURES[name].model()))
    scorer = Scorer(ARCHITECTURES[name].model())
    assert scorer.routers is not None
    plain, replayed = make_batch(made, 1000), make_batch(made, 1000, routers=scorer.routers.kind)
    torch.testing.assert_close(
        logprobs(scorer, replayed), logprobs(scorer, plain), atol=2e-5, rtol=0
    )
    torch.testing.assert_close(logprobs(scorer, replayed), replayed.behaviour, atol=2e-5, rtol=0)
