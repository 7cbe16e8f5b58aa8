"""Expectations over all sequences of a small vocabulary against closed forms.

Sequences of 2 tokens over 3 words, sampled from mu, so that sum(mu * f) is an expectation without
sampling error. The policies pi, mu, p and the reference are tables of conditional logits [4, 3]:
row 0 for the first token, row 1 + w for the second after the word w.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from msgspec import structs
from torch import Tensor

from umbra.services.config.presets import PRESETS, ObjectiveSpec, Preset
from umbra.services.modeling.micro_batch import Supports
from umbra.services.trainer.objectives.advantages import token_advantages
from umbra.services.trainer.objectives.objective import Candidates, Objective, TokenInputs
from umbra.services.trainer.objectives.terms import ESTIMATORS, Sequences

WORDS, LENGTH = 3, 2
SEQUENCES = list(product(range(WORDS), repeat=LENGTH))
ROWS = torch.tensor([row for first, _ in SEQUENCES for row in (0, 1 + first)])  # [18]
TOKENS = torch.tensor([word for sequence in SEQUENCES for word in sequence])  # [18]
OWNER = torch.arange(len(SEQUENCES)).repeat_interleave(LENGTH)


@dataclass
class World:
    """Log probabilities [18] of each token of each sequence, and the chance of its sequence."""

    table: Tensor  # pi's logits [4, 3], with gradient
    pi: Tensor
    mu: Tensor
    p: Tensor
    reference: Tensor
    advantages: Tensor
    chance: Tensor  # mu(sequence) at each of its tokens
    sampler: Tensor  # log mu of every word [4, 3]


def world(seed: int, spread: float) -> World:
    generator = torch.Generator().manual_seed(seed)

    def logits(near: Tensor | float, scale: float) -> Tensor:
        noise = torch.randn(1 + WORDS, WORDS, generator=generator, dtype=torch.float64)
        return near + scale * noise

    mu = logits(0.0, 1.0)
    p = logits(mu, spread / 2)
    pi = logits(p, spread).requires_grad_()
    reference = logits(mu, 1.0)
    logs = {
        name: table.log_softmax(1)[ROWS, TOKENS]
        for name, table in {"pi": pi, "mu": mu, "p": p, "reference": reference}.items()
    }
    each = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
    chance = total(logs["mu"]).exp()
    return World(pi, **logs, advantages=each[OWNER], chance=chance, sampler=mu.log_softmax(1))


def total(values: Tensor) -> Tensor:
    """Sum over each sequence, at each of its tokens [18]."""
    return values.reshape(-1, LENGTH).sum(1)[OWNER]


def losses(pieces: ObjectiveSpec, w: World, candidates: Candidates | None = None) -> Tensor:
    sequences = Sequences(OWNER, len(SEQUENCES))
    objective = Objective(pieces)
    zeros = torch.zeros_like(w.pi)
    tokens = TokenInputs(w.pi, w.mu, w.p, w.advantages, sequences, zeros, w.reference, candidates)
    return objective(tokens).losses


def gradient_of(coefficients: Tensor, w: World, tokens: Tensor = TOKENS) -> Tensor:
    """sum of mu(sequence) c grad log pi(token) by softmax's own derivative, [4, 3]."""
    probabilities = w.table.detach().softmax(1)
    found = torch.zeros_like(probabilities)
    for c, row, token in zip(w.chance * coefficients, ROWS, tokens, strict=True):
        found[row] -= c * probabilities[row]
        found[row, token] += c
    return found


def autograd(value: Tensor, w: World) -> Tensor:
    return torch.autograd.grad(value, w.table, retain_graph=True)[0]


# The coefficient of grad log pi of each token, by the formula of each paper; r = pi / mu or pi / p.


def clipped(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    flat = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
    return torch.where(flat, 0.0, -a * r)


def ppo(w: World, low: float = 0.2, high: float = 0.2) -> Tensor:
    return clipped((w.pi - w.mu).exp(), w.advantages, low, high)


def naive(w: World) -> Tensor:
    return clipped((w.pi - w.p).exp(), w.advantages, 0.2, 0.2)


def tis(w: World) -> Tensor:
    return naive(w) * (w.p - w.mu).exp().clamp(max=2)


def tis_opsm(w: World) -> Tensor:
    drift = total(w.mu - w.pi) / LENGTH
    return torch.where((w.advantages < 0) & (drift > 0.2), 0.0, tis(w))


def banded(w: World, low: float, high: float) -> Tensor:
    weight = (w.p - w.mu).exp()
    return torch.where((weight < low) | (weight > high), 0.0, naive(w) * weight)


def moved_far(w: World) -> Tensor:
    change = w.pi.exp() - w.mu.exp()
    return torch.where(w.advantages > 0, change > 0.2, change < -0.2)


def prime_rl(w: World) -> Tensor:
    gain = torch.where(moved_far(w), 0.0, -w.advantages * (w.pi - w.mu).exp())
    return gain + 2e-3 * (w.pi - w.mu)


def gspo(w: World) -> Tensor:
    return clipped((total(w.pi - w.mu) / LENGTH).exp(), w.advantages, 3e-4, 4e-4)


def cispo(w: World) -> Tensor:
    return -w.advantages * (w.pi - w.mu).exp().clamp(max=5)


COEFFICIENTS: dict[Preset, Callable[[World], Tensor]] = {
    "ppo": ppo,
    "naive": naive,
    "tis": tis,
    "tis_opsm": tis_opsm,
    "decoupled": lambda w: banded(w, 0.0, 2.0),
    "icepop": lambda w: banded(w, 0.5, 5.0),
    "prime_rl": prime_rl,
    "grpo": ppo,
    "dr_grpo": ppo,
    "dapo": lambda w: ppo(w, high=0.28),
    "rloo": ppo,
    "reinforce_pp": ppo,
    "reinforce_pp_baseline": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "ppo_critic": ppo,
    "opd": lambda w: torch.where(moved_far(w), 0.0, -w.advantages * (w.pi - w.mu).exp()),
}


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_expected_gradient_of_every_preset(preset: Preset, spread: float) -> None:
    for seed in range(5):
        w = world(seed, spread)
        found = autograd((w.chance * losses(PRESETS[preset], w)).sum(), w)
        expected = gradient_of(COEFFICIENTS[preset](w).detach(), w)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "pieces",
    [
        ObjectiveSpec(clip="none"),
        ObjectiveSpec(clip="none", anchor="proximal", correction="truncate", is_cap=0.0),
        ObjectiveSpec(clip="none", anchor="proximal", correction="mask", is_cap=0.0),
    ],
)
def test_without_bounds_the_gradient_is_that_of_the_return(pieces: ObjectiveSpec) -> None:
    """sum over t of E_mu(prefix) E_pi(token | prefix)[A]: the state distribution stays mu's."""
    w = world(0, 1.0)
    found = autograd((w.chance * losses(pieces, w)).sum(), w)
    expected = autograd(-(w.chance * (w.pi - w.mu).exp() * w.advantages).sum(), w)
    torch.testing.assert_close(found, expected)


def exact_kl(w: World, reverse: bool = False) -> Tensor:
    """sum over t of E_mu(prefix) KL(pi || reference), or of KL(reference || pi)."""
    prefixes = torch.zeros(1 + WORDS, dtype=torch.float64)
    prefixes[0] = 1.0
    for i, (first, _) in enumerate(SEQUENCES):
        prefixes[1 + first] += w.chance[LENGTH * i]
    pi = w.table.log_softmax(1)
    reference = torch.zeros_like(pi).index_put((ROWS, TOKENS), w.reference)
    one, other = (reference, pi) if reverse else (pi, reference)
    return (prefixes * (one.exp() * (one - other)).sum(1)).sum()


@pytest.mark.parametrize(
    "estimator, expected",
    [
        ("k1", lambda w: torch.zeros_like(w.table)),
        ("k2", lambda w: autograd(exact_kl(w), w)),
        ("k3", lambda w: autograd(exact_kl(w, reverse=True), w)),
    ],
)
def test_estimators_on_policy(estimator: str, expected: Callable[[World], Tensor]) -> None:
    w = world(2, 1.0)
    under_pi = (w.chance * (w.pi - w.mu).exp()).detach()
    value = (under_pi * ESTIMATORS[estimator](w.pi, w.reference)).sum()
    torch.testing.assert_close(autograd(value, w), expected(w))
    if estimator != "k2":  # which is biased
        torch.testing.assert_close(value, exact_kl(w))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_is_the_kl(estimator: str, anchor: str, level: str) -> None:
    """Off-policy and at every anchor, since the tokens are mu's: DeepSeek-V3.2, eq. 7."""
    w = world(3, 1.0)
    pieces = ObjectiveSpec(
        anchor=anchor,  # pyright: ignore[reportArgumentType]
        ratio_level=level,  # pyright: ignore[reportArgumentType]
        kl_coef=1.0,
        kl_estimator=estimator,  # pyright: ignore[reportArgumentType]
        kl_unbiased=True,
    )
    w.advantages.zero_()
    value = (w.chance * losses(pieces, w)).sum()
    torch.testing.assert_close(value, exact_kl(w))
    torch.testing.assert_close(autograd(value, w), autograd(exact_kl(w), w))


# -- score centering -------------------------------------------------------------------------------


def candidates(w: World, head: int = WORDS) -> Candidates:
    """Return the sampler's `head` likeliest words; all of them as of a cut distribution."""
    likeliest = w.sampler.topk(head, 1)
    supports = Supports(
        sizes=torch.full_like(ROWS, head),
        ids=likeliest.indices[ROWS].flatten(),
        logprobs=likeliest.values[ROWS].flatten(),
        whole=torch.full_like(ROWS, head == WORDS, dtype=torch.bool),
    )
    found = w.table.log_softmax(1)[ROWS].gather(1, likeliest.indices[ROWS])
    return Candidates.of(supports, torch.arange(len(ROWS)), found, torch.zeros(len(ROWS)) > 0)


def on_policy_update(seed: int, spread: float) -> World:
    """The first update of a batch: p is pi."""
    w = world(seed, spread)
    return replace(w, p=w.pi.detach())


def within(preset: Preset, cap: float = torch.inf) -> Callable[[World, World], Tensor]:
    """Return the coefficient of a word, without any where the drawn one is left out."""
    return lambda one, w: torch.where(
        COEFFICIENTS[preset](w) == 0, 0.0, -w.advantages * (one.pi - one.mu).exp().clamp(max=cap)
    )


PIECES = {**PRESETS, "tis by response": structs.replace(PRESETS["tis"], is_level="sequence")}
CENTERED: dict[str, Callable[[World, World], Tensor]] = {
    **{
        name: lambda one, _, name=name: COEFFICIENTS[name](one)
        for name in ("naive", "tis", "decoupled", "icepop", "cispo")
    },
    **{name: within(name) for name in ("ppo", "dapo")},
    # A response is masked as a whole, by the tokens that were drawn.
    "tis_opsm": lambda one, w: torch.where(
        (w.advantages < 0) & (total(w.mu - w.pi) / LENGTH > 0.2), 0.0, tis(one)
    ),
    "tis by response": lambda one, w: naive(one) * total(w.p - w.mu).exp().clamp(max=2),
}


@pytest.mark.parametrize("head", [WORDS, WORDS - 1])  # one word is left: no approximation
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("preset", CENTERED)
def test_centering_takes_off_the_expected_score(preset: str, spread: float, head: int) -> None:
    """arXiv 2609.20807: sum over a of mu(a) A (c(a) s(a) - sum over v of mu(v) c(v) s(v))."""
    for seed in range(3):
        w = on_policy_update(seed, spread)
        found = autograd((w.chance * losses(PIECES[preset], w, candidates(w, head))).sum(), w)
        expected = gradient_of(CENTERED[preset](w, w).detach(), w)
        words = w.table.detach().log_softmax(1)[ROWS]
        for word in range(WORDS):
            mu = w.sampler[ROWS, word]
            one = replace(w, pi=words[:, word], p=words[:, word], mu=mu)
            drawn = mu.exp() * CENTERED[preset](one, w).detach()
            expected -= gradient_of(drawn, w, torch.full_like(TOKENS, word))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("preset", "update"),
    [
        *((name, on_policy_update) for name in ("ppo", "dapo")),
        *((name, world) for name in ("naive", "tis")),  # clipped in later updates only
    ],
)
def test_centered_scores_leave_the_trust_region_alone(
    preset: Preset, update: Callable[[int, float], World]
) -> None:
    """Else the clip's pull back to mu is taken off as a drift, and the policy runs away."""
    w = update(1, 1.0)
    outside = COEFFICIENTS[preset](w) == 0
    assert 0 < outside.sum() < len(outside)
    for loss in losses(PRESETS[preset], w, candidates(w))[outside]:
        torch.testing.assert_close(autograd(loss, w), torch.zeros_like(w.table))


# -- on-policy distillation ------------------------------------------------------------------------


def test_distillation_follows_the_reverse_kl_to_the_teacher() -> None:
    """On-policy the expected gradient is that of KL(pi || teacher) at each prefix."""
    w, pieces = world(4, 0.0), PRESETS["opd"]
    count = len(SEQUENCES)
    penalties = pieces.kl_coef * ESTIMATORS[pieces.kl_estimator](w.mu, w.reference)
    unread = torch.randn(count)  # rewards
    advantages, _ = token_advantages(unread, torch.arange(count), OWNER, pieces, penalties)
    w = replace(w, advantages=advantages.double())
    found = autograd((w.chance * losses(pieces, w)).sum(), w)
    torch.testing.assert_close(found, autograd(exact_kl(w), w), rtol=1e-5, atol=1e-6)
