"""The slot engine against plain forward passes; its sampler against what was asked for."""

import random
import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.closeness import assert_same_logprobs
from fakes.mixed_cache import logprobs_of
from fakes.versions import load

from umbra.proto.errors import UmbraError
from umbra.proto.records import Sampling, VersionSpan, unpack_float32, unpack_int32
from umbra.services.config.loader import load_config
from umbra.services.generator import service
from umbra.services.generator.engines import opening
from umbra.services.generator.engines.engine import EngineError, EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import Sampler, TorchEngine, restrict
from umbra.services.modeling import row_sizes

STOP = 3
CPU = torch.device("cpu")
PLAIN = Sampling(max_tokens=40)


def requests(count: int, *, seed: int = 0, most: int = 40) -> list[EngineRequest]:
    source = random.Random(seed)
    return [
        EngineRequest(
            f"r{i}",
            [source.randrange(5, 100) for _ in range(source.randint(1, 30))],
            PLAIN,
            source.randint(1, most),
        )
        for i in range(count)
    ]


def finish(engine: TorchEngine, *asked: EngineRequest) -> dict[str, EngineOutput]:
    engine.submit(asked)
    outputs: dict[str, EngineOutput] = {}
    while engine.busy:
        outputs |= {output.request_id: output for output in engine.poll(0.0)}
    return outputs


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] before each of `tokens` in one forward pass without a cache."""
    return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def assert_logprobs(
    model: Any, asked: Iterable[EngineRequest], got: dict[str, EngineOutput]
) -> None:
    for request in asked:
        output = got[request.request_id]
        logits = logits_of(model, request.prompt_ids, output.token_ids)
        expected = logprobs_of(logits, output.token_ids)
        assert_same_logprobs(torch.tensor(output.logprobs), expected, model)


@pytest.mark.parametrize("slots", [7, 64])
def test_logprobs_are_those_of_a_full_forward_pass(model: Any, slots: int) -> None:
    asked = requests(40)
    engine = TorchEngine(model, stop_ids={STOP}, slots=slots, max_context=128)
    outputs = finish(engine, *asked)
    assert len(outputs) == 40
    assert_logprobs(model, asked, outputs)
    for request in asked:
        output = outputs[request.request_id]
        ended = output.token_ids[-1] == STOP
        assert output.finish_reason == ("stop" if ended else "length")
        assert ended or len(output.token_ids) == request.max_tokens
        assert STOP not in output.token_ids[:-1]
        assert output.spans == [VersionSpan(version=-1, start=0, end=len(output.token_ids))]


def test_equal_prompts_are_read_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    engine = TorchEngine(model, stop_ids={STOP}, slots=16, max_context=128)
    forward = model.forward

    def counted(input_ids: torch.Tensor, **inputs: Any) -> Any:
        passes.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **inputs)

    monkeypatch.setattr(model, "forward", counted)
    two = requests(2)
    asked = [
        EngineRequest(f"{r.request_id}-{i}", r.prompt_ids, PLAIN, 12) for i in range(8) for r in two
    ]
    outputs = finish(engine, *asked)
    contexts = sum(len(r.prompt_ids) - 1 for r in two)
    assert passes[0] == 16 + contexts
    assert max(passes[1:]) <= 16
    monkeypatch.undo()
    assert_logprobs(model, asked, outputs)
    assert len({tuple(outputs[f"r0-{i}"].token_ids) for i in range(8)}) > 1


def test_context_is_the_limit_and_storage_grows_up_to_it(model: Any) -> None:
    engine = TorchEngine(model, stop_ids=(), slots=2, max_context=150)
    request = EngineRequest("long", [7] * 20, PLAIN, 1000)
    outputs = finish(engine, request)
    assert len(outputs["long"].token_ids) == 130
    assert_logprobs(model, [request], outputs)


@pytest.mark.parametrize(
    ("prompt", "new", "changes", "sentence"),
    [
        ([], 1, {}, "its prompt has no tokens"),
        ([5] * 16, 1, {}, "16 prompt tokens and 1 new ones do not fit a context of 16"),
        ([5, 101], 1, {}, "its prompt has token 101, but the model knows 101"),
        ([5], 1, {"temperature": -1.0}, "sampling.temperature = -1 is out of range: use 0 or more"),
        ([5], 1, {"top_p": float("nan")}, "sampling.top_p = nan is out of range"),
        ([5], 1, {"top_k": -2}, "sampling.top_k = -2 is out of range: use 0 or more"),
        ([5], 1, {"min_p": 1.5}, "sampling.min_p = 1.5 is out of range: use between 0 and 1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    model: Any, prompt: list[int], new: int, changes: dict[str, Any], sentence: str
) -> None:
    engine = TorchEngine(model, stop_ids={STOP}, slots=2, max_context=16)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        engine.submit([EngineRequest("bad", prompt, Sampling(**changes), new)])
    assert not engine.busy


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
    got = finish(engine)
    assert_logprobs(model, asked, got)


def test_aborting_some_leaves_the_others_exact(model: Any) -> None:
    asked = [EngineRequest(r.request_id, r.prompt_ids, PLAIN, 15) for r in requests(12)]
    engine = TorchEngine(model, stop_ids=(), slots=8, max_context=64)
    engine.submit(asked)
    engine.poll(0.0)
    gone = {o.request_id: len(o.token_ids) for o in engine.abort(["r0", "r3", "r11", "absent"])}
    assert gone == {"r0": 1, "r3": 1, "r11": 0}
    outputs = finish(engine)
    assert len(outputs) == 9
    assert_logprobs(model, [r for r in asked if r.request_id not in gone], outputs)


def test_sampling_is_each_requests_own(model: Any) -> None:
    """Scenario: greedy, restricted and plain rows in one batch. Result: each as if alone."""
    kinds = [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=0.5), Sampling()]
    asked = [EngineRequest(f"r{i}", [9, 8, 7 + i // 4], kinds[i % 4], 20) for i in range(16)]
    engine = TorchEngine(model, stop_ids=(), slots=8, max_context=64)
    outputs = finish(engine, *asked)
    for index, request in enumerate(asked):
        output = outputs[request.request_id]
        logits = logits_of(model, request.prompt_ids, output.token_ids)
        expected = logprobs_of(logits, output.token_ids, request.sampling.temperature or 1.0)
        if index % 4 < 2:
            assert output.token_ids == logits.argmax(-1).tolist()
        if index % 4 == 1:
            expected = torch.zeros_like(expected)  # of the one token that is left
        assert_same_logprobs(torch.tensor(output.logprobs), expected, model)


def test_broken_weights_end_the_engine_with_a_sentence(model: Any) -> None:
    engine = TorchEngine(model, stop_ids={STOP}, slots=2, max_context=64, version=1)
    engine.submit(requests(2))
    engine.poll(0.0)
    spoiled = {name: torch.full_like(p, torch.nan) for name, p in model.named_parameters()}
    load(engine, spoiled.items(), 2, "keep")
    with pytest.raises(EngineError, match="the logits of version 2 are not finite"):
        engine.poll(0.0)


def test_a_generator_that_starts_again_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed for all its lives, 16 of 128 samples repeated another of their group."""
    seeds: list[int] = []

    def refuse(_config: Any, seed: int) -> None:
        seeds.append(seed)
        raise UmbraError("no engine")

    monkeypatch.setattr(opening, "open_torch", refuse)
    config = load_config(overrides=["generator.engine=torch"], environ={})
    for name in ("generator-0", "generator-0", "generator-1"):
        with pytest.raises(UmbraError, match="no engine"):
            service.run(SimpleNamespace(config=config, name=name, begin=print))  # pyright: ignore
    assert len(set(seeds)) == 3


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
        (Sampling(top_k=100), 6),
        # Softmax: .557 .205 .124 .075 .028 .010
        (Sampling(top_p=0.5), 1),
        (Sampling(top_p=0.7), 2),
        (Sampling(top_p=0.95), 4),
        (Sampling(min_p=0.3), 2),
        (Sampling(min_p=1.0), 1),
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


def test_rows_have_their_own_settings() -> None:
    sampler = Sampler(CPU, seed=0)
    logits = LOGITS.expand(2, -1)
    sampler.sample(logits, [Sampling(), Sampling(top_k=2)])
    tokens, logprobs, _ = sampler.sample(logits, [Sampling(temperature=0), Sampling(top_k=2)])
    assert tokens[0] == 0
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, -1)[0].item())
    assert tokens[1] in (0, 1)
    assert logprobs[1] == pytest.approx(torch.log_softmax(LOGITS[:2], -1)[tokens[1]].item())


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


def test_a_support_that_is_found_anew_is_another_one_at_the_edge() -> None:
    """Rounding exchanges two tokens where the cut is: the one that was drawn is outside then."""
    generator = torch.tensor([[2.0, 1.0, 1.0 - 1e-6, -1.0]])
    trainer = torch.tensor([[2.0, 1.0 - 1e-6, 1.0, -1.0]])
    sampling = Sampling(top_k=2)
    _, _, (support,) = Sampler(CPU, seed=0).sample(generator, [sampling])
    assert support is not None
    kept = unpack_int32(support.ids)
    assert kept == [0, 1]
    settings, greedy = torch.tensor([[1.0, 2.0, 1.0, 0.0]]), torch.tensor([[False]])
    fresh = restrict(trainer, settings, greedy).log_softmax(-1)
    assert fresh[0, 1] == -torch.inf
    sampled = restrict(generator, settings, greedy).log_softmax(-1)[0, kept]
    torch.testing.assert_close(trainer[0, kept].log_softmax(-1), sampled, atol=1e-5, rtol=0)
