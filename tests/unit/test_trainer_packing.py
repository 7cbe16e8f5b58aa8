"""Packed logprobs are those of each sequence alone, however the sequences are laid out."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from umbra.services.modeling.packing import Tokens, first_fit_decreasing, pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.policy import load_policy

LENGTHS = [9, 2, 30, 5, 5, 17, 3, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64, init_std=0.2)
    return load_policy(path)[0].eval()


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    """Sequences whose second half is learned."""
    lengths = torch.tensor(LENGTHS)
    starts = lengths.cumsum(0) - lengths
    learned, owner = [], []
    for sample, (start, length) in enumerate(zip(starts.tolist(), LENGTHS, strict=True)):
        for position in range(start + max(1, length // 2), start + length):
            learned.append(position)
            owner.append(sample)
    ids = torch.randint(5, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return Tokens(ids, lengths, torch.tensor(learned), torch.tensor(owner))


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


@pytest.mark.parametrize("pack_tokens", [1, 20, 64, 200])
@pytest.mark.parametrize("micro_tokens", [1, 100, 10_000])
@torch.no_grad()
def test_packing_changes_no_logprob(
    model: PreTrainedModel, tokens: Tokens, pack_tokens: int, micro_tokens: int
) -> None:
    temperature = torch.linspace(0.5, 1.5, len(tokens.learned))
    scorer = Scorer(model)
    found = torch.full((len(tokens.learned),), float("nan"))
    for micro in pack(tokens, pack_tokens=pack_tokens, micro_tokens=micro_tokens):
        rows, width = micro.input_ids.shape
        assert rows == 1 or rows * width <= micro_tokens
        assert width <= pack_tokens or (micro.position_ids[0] == torch.arange(width)).all()
        found[micro.source] = scorer(micro, temperature[micro.source])[0]
    expected = one_by_one(model, tokens, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_row_of_one_sequence_needs_no_mask(model: PreTrainedModel, tokens: Tokens) -> None:
    assert all(m.mask is None for m in pack(tokens, pack_tokens=1, micro_tokens=10))
    (dense,) = pack(tokens, pack_tokens=64, micro_tokens=10_000)
    assert dense.mask is not None
    assert dense.mask.any(-1).all(), "a row of the mask without any True gives NaN"


@torch.no_grad()
def test_other_sequences_of_a_row_cannot_be_seen(model: PreTrainedModel, tokens: Tokens) -> None:
    """Changing every other sequence leaves the logprobs of one as they are."""
    ones = torch.ones(len(tokens.learned))
    (before,) = pack(tokens, pack_tokens=200, micro_tokens=10_000)
    changed = tokens.ids.clone()
    start, stop = sum(LENGTHS[:5]), sum(LENGTHS[:6])
    changed[:start] = 7
    changed[stop:] = 7
    other = Tokens(changed, tokens.lengths, tokens.learned, tokens.owner)
    (after,) = pack(other, pack_tokens=200, micro_tokens=10_000)
    scorer = Scorer(model)
    mine = tokens.owner[before.source] == 5
    torch.testing.assert_close(
        scorer(before, ones)[0][mine], scorer(after, ones)[0][mine], atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_a_subset_of_the_sequences(model: PreTrainedModel, tokens: Tokens) -> None:
    subset = torch.tensor([6, 2])
    micros = pack(tokens, pack_tokens=64, micro_tokens=10_000, sequences=subset)
    source = torch.cat([m.source for m in micros])
    assert set(tokens.owner[source].tolist()) == {2, 6}
    assert pack(tokens, pack_tokens=64, micro_tokens=64, sequences=subset[:0]) == []
    ones = torch.ones(len(tokens.learned))
    found = torch.cat([Scorer(model)(m, ones[m.source])[0] for m in micros])
    expected = one_by_one(model, tokens, ones)[source]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_entropy_of_a_flat_distribution(model: PreTrainedModel, tokens: Tokens) -> None:
    (micro,) = pack(tokens, pack_tokens=64, micro_tokens=10_000)
    hot = torch.full((len(micro.source),), 1e6)
    logprobs, entropy = Scorer(model)(micro, hot)
    flat = torch.tensor(float(model.config.vocab_size)).log()
    torch.testing.assert_close(entropy, flat.expand_as(entropy), atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, -flat.expand_as(logprobs), atol=1e-4, rtol=0)


def test_a_long_sequence_does_not_stretch_the_short_ones() -> None:
    lengths = torch.tensor([101, *[6] * 20])
    learned = lengths.cumsum(0) - 1
    tokens = Tokens(torch.zeros(int(lengths.sum())).long(), lengths, learned, torch.arange(21))
    micros = pack(tokens, pack_tokens=10, micro_tokens=10_000)
    assert [tuple(m.input_ids.shape) for m in micros] == [(1, 100), (10, 10)]
    (both,) = pack(tokens, pack_tokens=100, micro_tokens=10_000)
    assert both.input_ids.shape == (2, 100)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_first_fit_decreasing_places_each_once_within_capacity(
    lengths: list[int], capacity: int
) -> None:
    rows = first_fit_decreasing(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[item] for item in row) <= capacity
