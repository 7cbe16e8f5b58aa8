"""Sampled frequencies and logprobs against the distribution that was asked for."""

import pytest
import torch

from umbra.proto.records import Sampling, unpack_float32, unpack_int32
from umbra.services.generator.engines.torch_engine import Sampler, restrict

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
DRAWS = 20_000


def draw(sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies [V] of many draws, and the logprob [V] reported for each token drawn."""
    sampler = Sampler(torch.device("cpu"), seed=0)
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
    sampler = Sampler(torch.device("cpu"), seed=0)
    logits = LOGITS.expand(2, -1)
    sampler.sample(logits, [Sampling(), Sampling(top_k=2)])
    tokens, logprobs, _ = sampler.sample(logits, [Sampling(temperature=0), Sampling(top_k=2)])
    assert tokens[0] == 0
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, -1)[0].item())
    assert tokens[1] in (0, 1)
    assert logprobs[1] == pytest.approx(torch.log_softmax(LOGITS[:2], -1)[tokens[1]].item())


def test_what_could_have_been_drawn_is_told() -> None:
    """Of a cut row all that is left in, of a plain one the head, of a greedy one nothing."""
    sampler = Sampler(torch.device("cpu"), seed=0, head=2)
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
    alone = Sampler(torch.device("cpu"), seed=0).sample(logits, rows)[2]
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
    _, _, (support,) = Sampler(torch.device("cpu"), seed=0).sample(generator, [sampling])
    assert support is not None
    kept = unpack_int32(support.ids)
    assert kept == [0, 1]
    settings, greedy = torch.tensor([[1.0, 2.0, 1.0, 0.0]]), torch.tensor([[False]])
    fresh = restrict(trainer, settings, greedy).log_softmax(-1)
    assert fresh[0, 1] == -torch.inf
    sampled = restrict(generator, settings, greedy).log_softmax(-1)[0, kept]
    torch.testing.assert_close(trainer[0, kept].log_softmax(-1), sampled, atol=1e-5, rtol=0)
