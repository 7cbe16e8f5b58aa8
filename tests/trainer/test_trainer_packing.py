"""Packed logprobs equal each sequence's alone, however the sequences are laid out."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.closeness import assert_same_logprobs, assert_same_sums, model_terms
from fakes.packed_rows import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.packing import MicroBatch, pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.policy import load_policy

PAIR_COST = 16 / (6 * 1024)  # of Qwen3-0.6B, for sequences of which a token stands for 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64, init_std=0.2)
    return load_policy(path)[0].eval()


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    """Three prompts with 4, 3 and 1 responses, learned in part."""
    made = samples([(9, 1, 4), (1, 3, 3), (5, 3, 1)])
    part = torch.arange(len(made.learned)) % 3 != 1
    return replace(made, learned=made.learned[part], owner=made.owner[part])


def last_learned(*lengths: int) -> Tokens:
    """Sequences of so many tokens."""
    each = torch.tensor(lengths)
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    return Tokens(ids, each, each.cumsum(0) - 1, torch.arange(len(each)))


def one_by_one(model: PreTrainedModel, tokens: Tokens, temperature: Tensor) -> Tensor:
    """The reference: one plain forward pass per sequence."""
    result = torch.zeros(len(tokens.learned))
    start = 0
    for sample, length in enumerate(tokens.lengths.tolist()):
        ids = tokens.ids[start : start + length]
        logits = model(input_ids=ids[None]).logits[0]
        for entry in (tokens.owner == sample).nonzero().flatten().tolist():
            at = int(tokens.learned[entry]) - start
            scaled = logits[at - 1] / temperature[entry]
            result[entry] = scaled.log_softmax(-1)[ids[at]]
        start += length
    return result


def test_entropies_have_a_gradient_when_asked_for(model: PreTrainedModel, tokens: Tokens) -> None:
    (micro,) = pack(tokens, pack_tokens=200, micro_tokens=10_000)
    scorer, ones = Scorer(model), torch.ones(len(micro.source))
    found = {asked: scorer(micro, ones, entropy_gradient=asked) for asked in (False, True)}
    assert [found[asked][1].requires_grad for asked in (False, True)] == [False, True]
    assert all(logprobs.requires_grad for logprobs, _ in found.values())
    assert torch.equal(found[True][1].detach(), found[False][1])
    assert not scorer(micro, ones, with_entropy=False)[1].any()
    with torch.no_grad():
        assert not scorer(micro, ones, entropy_gradient=True)[1].requires_grad


@torch.no_grad()
def test_logprobs_of_what_sampling_leaves_in(model: PreTrainedModel, tokens: Tokens) -> None:
    (micro,) = pack(tokens, pack_tokens=200, micro_tokens=10_000)
    count = len(micro.source)
    scorer, temperature = Scorer(model), torch.full((count,), 0.7)
    every = torch.arange(model.config.vocab_size)
    whole = torch.stack(
        [scorer(replace(micro, targets=token.expand(count)), temperature)[0] for token in every], -1
    )  # [N, V]
    likeliest = whole.topk(5)
    ids, cut = likeliest.indices.clone(), torch.arange(count) % 3 > 0  # else nothing was cut off
    ids[::2, 4] = -1  # four of them
    inside = likeliest.values.exp().masked_fill(ids < 0, 0.0).sum(-1).log()
    for place in (0, 3):
        chosen = replace(micro, targets=ids[:, place], support=ids, whole=cut)
        found, entropy = scorer(chosen, temperature, with_support=True)
        expected = likeliest.values - torch.where(cut, inside, 0.0)[:, None]
        assert_same_logprobs(found[:, 0], expected[:, place], model)
        assert_same_logprobs(found[:, 1:][ids >= 0], expected[ids >= 0], model)
        parts = torch.where(cut[:, None] & (ids >= 0), -expected.exp() * expected, 0.0).sum(-1)
        plain = -(whole.exp() * whole).sum(-1)
        assert_same_sums(entropy, torch.where(cut, parts, plain), terms=model.config.vocab_size)


def test_a_rank_with_fewer_micro_batches_splits_its_own() -> None:
    """None of them is empty while another one has two rows."""
    tokens = last_learned(101, 56, 56, 11)
    for rank, shapes in enumerate([[(1, 100), (1, 10)], [(1, 55), (1, 55)]]):
        micros = pack(tokens, pack_tokens=60, micro_tokens=110, rank=rank, world=2)
        assert [tuple(micro.input_ids.shape) for micro in micros] == shapes


def test_a_long_sequence_does_not_stretch_the_short_ones() -> None:
    tokens = last_learned(101, *[6] * 20)
    micros = pack(tokens, pack_tokens=10, micro_tokens=10_000)
    assert [tuple(m.input_ids.shape) for m in micros] == [(1, 100), (10, 10)]
    (both,) = pack(tokens, pack_tokens=100, micro_tokens=10_000)
    assert both.input_ids.shape == (2, 100)


@pytest.mark.parametrize("pack_tokens", [1, 12, 20, 200])
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
@pytest.mark.parametrize("share", [False, True])
def test_packing_changes_no_logprob_and_no_gradient(
    model: PreTrainedModel, tokens: Tokens, pack_tokens: int, micro_tokens: int, share: bool
) -> None:
    temperature = torch.linspace(0.5, 1.5, len(tokens.learned))
    weight = torch.linspace(-1.0, 1.0, len(tokens.learned))
    model.zero_grad()
    (one_by_one(model, tokens, temperature) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = torch.full((len(tokens.learned),), float("nan"))
    how: Any = {"micro_tokens": micro_tokens, "share_prompts": share}
    for micro in pack(tokens, pack_tokens=pack_tokens, **how):
        rows, width = micro.input_ids.shape
        assert rows == 1 or rows * width <= micro_tokens
        assert width <= pack_tokens or (micro.position_ids[0] == torch.arange(width)).all()
        logprobs, _ = Scorer(model)(micro, temperature[micro.source])
        found[micro.source] = logprobs.detach()
        (logprobs * weight[micro.source]).sum().backward()
    with torch.no_grad():
        reference = one_by_one(model, tokens, temperature)
    assert_same_logprobs(found, reference, model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        terms = model_terms(model.config, backward=True)
        assert_same_sums(parameter.grad, expected[name], terms=terms, what=name)


def test_a_prompt_is_fed_once_where_its_responses_fit(tokens: Tokens) -> None:
    apart = pack(tokens, pack_tokens=200, micro_tokens=10_000)
    shared = pack(tokens, pack_tokens=200, micro_tokens=10_000, share_prompts=True)
    fed = int((tokens.lengths - 1).sum())
    assert sum(m.tokens for m in apart) == fed
    assert sum(m.tokens for m in shared) == fed - 3 * 9 - 2 * 1
    # With room for two responses each, the first prompt is fed twice.
    tight = pack(tokens, pack_tokens=13, micro_tokens=10_000, share_prompts=True)
    assert sum(m.tokens for m in tight) == fed - 2 * 9 - 2 * 1


@pytest.mark.parametrize(("seed", "world"), [(199, 2), (1, 4), (2, 8)])
def test_ranks_end_no_later_than_with_equal_tokens(seed: int, world: int) -> None:
    """By what passes cost; of each rank the costliest comes first."""
    source = random.Random(seed)  # 4 to 2,048 tokens, their logarithms normal
    lengths = [min(2048, max(4, int(source.lognormvariate(4.8, 1.1)))) for _ in range(48)]
    tokens = last_learned(*lengths)

    def cost(micro: MicroBatch) -> float:
        fed = [lengths[line] - 1 for line in tokens.owner[micro.source].tolist()]
        return sum(one + PAIR_COST * one**2 / 2 for one in fed)

    def plans(pair_cost: float) -> list[list[float]]:
        how: Any = {"pack_tokens": 256, "micro_tokens": 512, "world": world}
        shares = [pack(tokens, **how, pair_cost=pair_cost, rank=rank) for rank in range(world)]
        return [[cost(micro) for micro in share] for share in shares]

    by_cost, by_tokens = plans(PAIR_COST), plans(0.0)
    assert all(plan == sorted(plan, reverse=True) for plan in by_cost)
    time, other = (sum(map(max, zip(*each, strict=True))) for each in (by_cost, by_tokens))
    assert time <= other * (1 + 1e-9)


def test_a_rank_without_work_has_an_empty_pass_with_a_gradient(model: PreTrainedModel) -> None:
    (micro,) = pack(last_learned(5), pack_tokens=8, micro_tokens=8, rank=1, world=2)
    assert micro.tokens == 0
    logprobs, entropy = Scorer(model)(micro, torch.ones(0))
    assert logprobs.shape == entropy.shape == (0,)
    model.zero_grad()
    logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name}: a sharded rank would not join the reduction"
        assert not parameter.grad.any()


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=8
    ),
    limits=st.tuples(st.integers(1, 30), st.integers(1, 60)),
    share=st.booleans(),
    world=st.integers(1, 5),
)
def test_each_learned_token_is_predicted_once_from_all_before_it_and_nothing_else(
    sizes: list[tuple[int, int, int]], limits: tuple[int, int], share: bool, world: int
) -> None:
    """So neither padding nor a neighbour gets into a sequence, and nothing is shifted by one.

    All ranks have equally many micro-batches, and at most one unit of work more than another.
    """
    tokens = samples(sizes)
    starts = (tokens.lengths.cumsum(0) - tokens.lengths)[tokens.owner].tolist()
    found: list[int] = []
    how: Any = {"pack_tokens": limits[0], "micro_tokens": limits[1], "share_prompts": share}
    plans = [pack(tokens, **how, rank=rank, world=world) for rank in range(world)]
    for micro in (micro for plan in plans for micro in plan):
        width = micro.input_ids.shape[1]
        seen = micro.mask.allowed()
        for index, target, source in zip(
            micro.index.tolist(), micro.targets.tolist(), micro.source.tolist(), strict=True
        ):
            row, place = divmod(index, width)
            context = micro.input_ids[row][seen[row, place]]
            before = context[micro.position_ids[row][seen[row, place]].argsort()]
            where = int(tokens.learned[source])
            assert torch.equal(before, tokens.ids[starts[source] : where])
            assert target == tokens.ids[where]
            found.append(source)
    assert sorted(found) == list(range(len(tokens.learned)))
    assert len({len(plan) for plan in plans}) == 1
    work = [sum(micro.tokens for micro in plan) for plan in plans]
    assert max(work) - min(work) <= max(limits[0], *tokens.lengths.tolist())
    assert sum(work) == sum(micro.tokens for micro in pack(tokens, **how))
