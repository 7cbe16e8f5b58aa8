"""Metrics of a batch are sums over tokens: the same as from all tokens, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.noisy_batch import noisy_trajectories
from fakes.token_table import TokenTable
from torch import Tensor

from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import LossMetrics
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import Sequences, ratio
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import minibatches

VERSION, PER_VERSION = 2, 4


class Together(Ranks):
    """One of several ranks in a process: what the others give is known."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__()
        self.others = others
        self.given: Tensor | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        self.given = tensor
        return torch.stack([tensor, *self.others])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64)
    return path


def noisy(model: Path, groups: int) -> TrainBatch:
    policy, _ = load_policy(model)
    made = noisy_trajectories(policy, groups=groups, size=4, version=VERSION)
    return make_batch(made, policy.config.vocab_size)


def passes(
    batch: TrainBatch, parts: list[Tensor], world: int
) -> list[tuple[int, int, Tensor, TokenInputs, TokenLosses, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made: list[tuple[int, int, Tensor, TokenInputs, TokenLosses, Tensor]] = []
    for update, part in enumerate(parts):
        for at, sample in enumerate(part.tolist()):
            source = (batch.tokens.owner == sample).nonzero().squeeze(1)
            count = len(source)
            behaviour = batch.behaviour[source]
            logprobs = behaviour + 0.4 * torch.randn(count, generator=generator)
            tokens = TokenInputs(
                logprobs=logprobs,
                behaviour=behaviour,
                advantages=torch.randn(1, generator=generator).expand(count),
                sequences=Sequences(torch.zeros(count, dtype=torch.int64), 1),
                entropy=torch.rand(count, generator=generator),
            )
            losses = TokenLosses(
                losses=torch.randn(count, generator=generator),
                ratio=ratio(logprobs, behaviour),
                clipped=torch.rand(count, generator=generator) < 0.3,
                kept=torch.rand(count, generator=generator) < 0.8,
                kl=torch.rand(count, generator=generator),
            )
            made.append((at % world, update, source, tokens, losses, losses.losses.sum()))
    return made


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("cuts", "epochs"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("spent", [False, True], ids=["no pass before", "a pass before"])
def test_sums_say_what_the_table_of_all_tokens_says(
    model: Path, world: int, cuts: int, epochs: int, spent: bool
) -> None:
    batch = noisy(model, 3)
    samples = torch.arange(1, len(batch.trajectories))  # the first gets no pass
    parts = minibatches(samples, cuts, epochs, "7")
    found = batch.behaviour + 0.1 * torch.arange(len(batch.behaviour)).cos() if spent else None
    table = TokenTable(batch, found, cuts, len(parts))
    ranks = [
        LossMetrics(batch, found, cuts, len(parts), version=VERSION, per_version=PER_VERSION)
        for _ in range(world)
    ]
    for rank, update, source, tokens, losses, loss in passes(batch, parts, world):
        table.add(update, source, tokens, losses, loss)
        nothing = torch.zeros(len(source), dtype=torch.bool)
        ranks[rank].add(update, source, tokens, losses, loss, nothing)
    others: list[Tensor] = []
    for metrics in ranks[1:]:
        one = Together([])
        metrics.summary(one)
        assert one.given is not None
        others.append(one.given)
    row = ranks[0].summary(Together(others))
    assert row.pop("outliers") == 0
    expected = table.summary(VERSION, PER_VERSION)
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert row[name] is None, name
        else:
            assert row[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def test_outliers_count_as_masked_and_in_no_ratio(model: Path) -> None:
    batch = noisy(model, 2)
    parts = minibatches(torch.arange(len(batch.trajectories)), 1, 1, "7")
    rows: list[dict[str, float | None]] = []
    for spoil in (False, True):
        metrics = LossMetrics(batch, None, 1, 1, version=VERSION, per_version=1)
        for at, one in enumerate(passes(batch, parts, 1)):
            _, update, source, tokens, losses, loss = one
            out = torch.zeros_like(losses.kept)
            if at == 0:
                out[0] = True
                if spoil:
                    tokens.logprobs[0] = torch.nan
                    losses.ratio[0] = torch.inf
            metrics.add(update, source, tokens, losses, loss, out)
        rows.append(metrics.summary(Ranks()))
    assert rows[0] == rows[1], "whatever they are"
    assert rows[0]["outliers"] == 1
    assert (rows[0]["mask_fraction"] or 0) * len(batch.behaviour) >= 1
