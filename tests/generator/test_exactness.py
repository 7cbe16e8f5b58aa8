"""Interruptions and weights that change under way: every token and logprob as it has to be.

Recomputed with plain forward passes of the model, at places that are drawn at random.
"""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.closeness import assert_same_logprobs
from fakes.interrupted import (
    CONTEXT,
    STOPS,
    TEMPERATURE,
    check_logprobs,
    check_same,
    check_supports,
    roll,
)
from fakes.mixed_cache import logprobs_keeping_cache, logprobs_recomputing_cache
from fakes.versions import load, other_weights

from umbra.proto.records import Sampling, VersionSpan
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine


def engines(model: Any) -> Callable[[int], TorchEngine]:
    return lambda version: TorchEngine(
        model, stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version, version=version
    )


@pytest.mark.parametrize("seed", range(2))
def test_greedy_samples_are_the_same_however_often_they_are_interrupted(
    model: Any, tiny_model_dir: Path, seed: int
) -> None:
    whole = roll(engines(model), tiny_model_dir, 0.0)
    check_same(roll(engines(model), tiny_model_dir, 0.0, random.Random(seed)), whole)


@pytest.mark.parametrize("seed", range(2))
def test_logprobs_of_interrupted_samples_are_those_of_one_forward_pass(
    model: Any, tiny_model_dir: Path, seed: int
) -> None:
    pieces = roll(engines(model), tiny_model_dir, TEMPERATURE, random.Random(seed))
    check_logprobs(model, pieces)


@pytest.mark.parametrize("head", [0, 3])
def test_the_support_of_interrupted_samples_is_that_of_each_token(
    model: Any, tiny_model_dir: Path, head: int
) -> None:
    """Over the tokens that it tells, the trainer finds the logprobs that were sampled by."""

    def engine(version: int) -> TorchEngine:
        return TorchEngine(
            model, stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version, version=version,
            tell_head=head,
        )  # fmt: skip

    pieces = roll(engine, tiny_model_dir, TEMPERATURE, random.Random(0), top_k=4)
    check_supports(model, pieces, centered=head > 0)


def generate_with_updates(
    model: Any, models: dict[int, Any], asked: list[EngineRequest], policy: Any, seed: int
) -> dict[str, EngineOutput]:
    """Outputs of `asked` while the versions of `models` come after random numbers of tokens."""
    source = random.Random(seed)
    engine = TorchEngine(model, stop_ids=(), slots=6, max_context=128, seed=seed, version=0)
    engine.submit(asked)
    outputs: dict[str, EngineOutput] = {}
    versions = [v for v in models if v > 0]
    until = source.randint(1, 12)
    while engine.busy:
        outputs |= {o.request_id: o for o in engine.poll(0.0)}
        until -= 1
        if until == 0 and versions:
            version = versions.pop(0)
            until = source.randint(1, 12)
            load(engine, models[version].named_parameters(), version, policy)
    assert not versions
    return outputs


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_logprob_is_of_the_version_of_its_token(model: Any, policy: Any, seed: int) -> None:
    models = {0: copy.deepcopy(model), **{v: other_weights(model, v) for v in (1, 2, 3)}}
    source = random.Random(seed)
    sampling = Sampling(temperature=TEMPERATURE)
    asked = [
        EngineRequest(
            f"r{i}",
            [source.randrange(5, 100) for _ in range(source.randint(1, 20))],
            sampling,
            source.randint(5, 40),
        )
        for i in range(16)
    ]
    outputs = generate_with_updates(model, models, asked, policy, seed)
    assert len(outputs) == 16  # none is lost
    assert max(len(o.spans) for o in outputs.values()) > 2
    for request in asked:
        output = outputs[request.request_id]
        spans = output.spans
        assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
        assert spans[-1].end == len(output.token_ids) == len(output.logprobs)
        once_more = logprobs_keeping_cache if policy == "keep" else logprobs_recomputing_cache
        expected = torch.tensor(once_more(models, request.prompt_ids, output, TEMPERATURE))
        assert_same_logprobs(torch.tensor(output.logprobs), expected, models[0])


def test_a_kept_cache_is_not_the_same_as_one_computed_anew(model: Any) -> None:
    """Or the test above would tell nothing about the policies."""
    models = {0: model, 1: other_weights(model, 1)}
    prompt, tokens = list(range(10, 30)), list(range(40, 60))
    spans = [VersionSpan(version=0, start=0, end=10), VersionSpan(version=1, start=10, end=20)]
    output = EngineOutput("r", tokens, [0.0] * len(tokens), spans, "length")
    kept = torch.tensor(logprobs_keeping_cache(models, prompt, output))
    fresh = torch.tensor(logprobs_recomputing_cache(models, prompt, output))
    assert_same_logprobs(kept[:10], fresh[:10], models[0])
    assert (kept[10:] - fresh[10:]).abs().max() > 0.01, "by far more than rounding explains"
