"""The slot engine against plain forward passes; its sampler against what was asked for.

What every engine does is in `tests/integration/test_engines.py`; interrupted rollouts on it and on
vLLM in turn are in `tests/integration/test_vllm_models.py`.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.closeness import assert_same_logprobs
from fakes.interrupted import CONTEXT, STOPS, TEMPERATURE, check_supports, roll
from fakes.versions import finish, load, logprobs_of, request

from umbra.proto.errors import UmbraError
from umbra.proto.records import Sampling, unpack_float32, unpack_int32
from umbra.services.config.loader import load_config
from umbra.services.generator import service
from umbra.services.generator.engines import opening
from umbra.services.generator.engines.engine import EngineError, EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import Sampler, TorchEngine, restrict
from umbra.services.modeling import row_sizes

STOP = 3
CPU = torch.device("cpu")
PLAIN = Sampling(max_tokens=40)


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] before each of `tokens` in one forward pass without a cache."""
    return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def check(model: Any, engine: TorchEngine, asked: list[EngineRequest]) -> list[EngineOutput]:
    """Finish these requests; each logprob is that of one forward pass."""
    outputs = {output.request_id: output for output in finish(engine)}
    for one in asked:
        output = outputs[one.request_id]
        logits = logits_of(model, one.prompt_ids, output.token_ids)
        expected = logprobs_of(logits, output.token_ids, one.sampling.temperature or 1.0)
        if one.sampling.temperature == 0 or one.sampling.top_k == 1:
            assert output.token_ids == logits.argmax(-1).tolist()
        if one.sampling.top_k == 1:
            expected = torch.zeros_like(expected)  # of the one token that is left
        assert_same_logprobs(torch.tensor(output.logprobs), expected, model)
    return list(outputs.values())


def test_context_is_the_limit_and_storage_grows_up_to_it(model: Any) -> None:
    engine = TorchEngine(model, stop_ids=(), slots=2, max_context=150)
    asked = [EngineRequest("long", [7] * 20, PLAIN, 1000)]
    engine.submit(asked)
    assert [len(output.token_ids) for output in check(model, engine, asked)] == [130]


def test_a_pass_begins_no_more_contexts_than_a_cpu_reads_in_seconds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are renewed between passes; equal contexts, of a group, are read once."""
    monkeypatch.setattr(row_sizes, "READ_FLOPS", 0.0)  # as of a huge model: 256 tokens
    engine = TorchEngine(model, stop_ids=[STOP], slots=9, max_context=160)
    prompts = [[5 + i] * 101 for i in (0, 0, 0, 1, 1, 2, 3)]
    asked = [EngineRequest(f"r{i}", prompt, PLAIN, 6) for i, prompt in enumerate(prompts)]
    engine.submit(asked)
    first = engine.poll()
    assert (len(engine.new_tokens()), first) == (5, [])
    check(model, engine, asked)


def test_sampling_is_each_requests_own(model: Any) -> None:
    """Scenario: greedy, restricted and plain rows in one batch. Result: each as if alone."""
    kinds = [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=0.5), Sampling()]
    asked = [EngineRequest(f"r{i}", [9, 8, 7 + i // 4], kinds[i % 4], 20) for i in range(16)]
    engine = TorchEngine(model, stop_ids=(), slots=8, max_context=64)
    engine.submit(asked)
    check(model, engine, asked)


def test_broken_weights_end_the_engine_with_a_sentence(model: Any) -> None:
    engine = TorchEngine(model, stop_ids={STOP}, slots=2, max_context=64, version=1)
    engine.submit([request(0), request(1)])
    engine.poll(0.0)
    spoiled = {name: torch.full_like(p, torch.nan) for name, p in model.named_parameters()}
    load(engine, spoiled.items(), 2, "keep")
    with pytest.raises(EngineError, match="the logits of version 2 are not finite"):
        engine.poll(0.0)


def test_a_generator_that_starts_again_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed for all its lives, 16 of 128 samples repeated another of their group."""
    seeds: set[int] = set()

    def refuse(_config: Any, seed: int) -> None:
        seeds.add(seed)
        raise UmbraError("no engine")

    monkeypatch.setattr(opening, "open_torch", refuse)
    config = load_config(overrides=["generator.engine=torch"], environ={})
    for name in ("generator-0", "generator-0", "generator-1"):
        with pytest.raises(UmbraError, match="no engine"):
            service.run(SimpleNamespace(config=config, name=name, begin=print))  # pyright: ignore
    assert len(seeds) == 3


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


# -- the sampler ----------------------------------------------------------------------------------

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
DRAWS = 20_000


def draw(sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies [V] of many draws, and the logprob [V] reported for each token drawn."""
    sampler = Sampler(CPU, seed=0)
    tokens, logprobs, _ = sampler.sample(LOGITS.expand(DRAWS, -1), [sampling] * DRAWS)
    reported = torch.full_like(LOGITS, -torch.inf)
    reported[tokens] = logprobs
    return torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS, reported


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 6),
        (Sampling(temperature=0.5), 6),
        (Sampling(top_k=3), 3),
        (Sampling(top_k=1), 1),
        # Softmax: .557 .205 .124 .075 .028 .010
        (Sampling(top_p=0.7), 2),
        (Sampling(top_p=0.95), 4),
        (Sampling(min_p=0.3), 2),
        (Sampling(temperature=2.0, top_k=4, top_p=0.8, min_p=0.1), 3),
    ],
)
def test_tokens_follow_the_distribution_that_is_reported(sampling: Sampling, kept: int) -> None:
    frequencies, reported = draw(sampling)
    scaled = LOGITS / sampling.temperature
    scaled[kept:] = -torch.inf
    expected = torch.softmax(scaled, -1)
    drawn = frequencies > 0
    assert drawn.sum() == kept
    assert torch.allclose(reported[drawn].exp(), expected[drawn], atol=1e-6)
    assert reported.exp().sum() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(frequencies, expected, atol=0.015)


def test_what_could_have_been_drawn_is_told() -> None:
    """Of a cut row all that is left in, of a plain one the head, of a greedy one nothing."""
    sampler = Sampler(CPU, seed=0, head=2)
    logits = LOGITS.flip(0).expand(3, -1)
    rows = [Sampling(top_k=4, top_p=0.7), Sampling(), Sampling(temperature=0)]
    cut, plain, greedy = sampler.sample(logits, rows)[2]
    assert cut is not None and plain is not None and greedy is None
    assert unpack_int32(cut.ids) == [5, 4]
    assert unpack_int32(plain.ids) == [5, 4]
    kept = torch.log_softmax(LOGITS[:2], -1).tolist()
    assert unpack_float32(cut.logprobs or b"") == pytest.approx(kept)
    whole = torch.log_softmax(LOGITS, -1)[:2].tolist()
    assert unpack_float32(plain.logprobs or b"") == pytest.approx(whole)
    alone = Sampler(CPU, seed=0).sample(logits, rows)[2]
    assert [one and one.logprobs for one in alone] == [None, None, None]
    assert alone[0] is not None and alone[1] is None


def test_top_p_of_one_leaves_everything_in() -> None:
    """Though in float32 the mass before an unlikely token is 1 already."""
    logits = torch.tensor([[0.0, -30.0, -40.0]])
    plain = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    assert restrict(logits, plain, torch.tensor([[False]])).tolist() == logits.tolist()
    nearly = torch.tensor([[1.0, 0.0, 0.999, 0.0]])
    assert restrict(logits, nearly, torch.tensor([[False]])).isfinite().tolist() == [
        [True, False, False]
    ]
