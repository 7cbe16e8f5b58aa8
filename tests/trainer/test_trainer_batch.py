"""Trajectories become tensors; metrics of a batch are the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.rank_bench import noisy_trajectories
from fakes.trajectories import trajectory as made
from torch import Tensor

from umbra.proto.records import Sampling, Trajectory, VersionSpan
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.metrics import (
    LossMetrics,
    Row,
    environment_metrics,
    mismatch_row,
    mismatch_sums,
    sample_metrics,
)
from umbra.services.trainer.objectives.advantages import dr_grpo
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import Sequences, ratio
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import minibatches

HALF = Sampling(temperature=0.5)


def trajectory(**changes: Any) -> Trajectory:
    """Two prompt and three response tokens, the middle one from the environment."""
    spans = [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)]
    values = {"loss_mask": b"\1\0\1", "spans": spans, "reward": 1.0, "sampling": HALF}
    return made([5, 6], [7, 8, 9], [-1.0, 0.0, -2.0], **{**values, **changes})


def test_tensors() -> None:
    second = made([1], [2], [-0.25], version=4, group_id="g2", reward=0.0)
    batch = make_batch([trajectory(), second], vocab_size=10)
    assert batch.tokens.ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert batch.tokens.lengths.tolist() == [5, 2]
    assert batch.tokens.learned.tolist() == [2, 4, 6]
    assert batch.tokens.owner.tolist() == [0, 0, 1]
    assert batch.behaviour.tolist() == [-1.0, -2.0, -0.25]
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0]
    assert batch.groups.tolist() == [0, 1]
    assert batch.leading(4).tolist() == [False, False, True]
    assert batch.leading(3).tolist() == [True, False, False], "the second is of version 4"
    row = sample_metrics(batch, version=6)
    assert row["reward/mean"] == row["solved"] == row["multi_version"] == 0.5
    assert (row["staleness/total/mean"], row["staleness/total/max"]) == (2.5, 3.0)
    assert (row["staleness/in_flight/mean"], row["staleness/in_queue/mean"]) == (0.5, 2.0)
    assert row["response_length/mean"] == 2.0
    assert row["truncated"] == row["duplicates"] == 0.0
    row = environment_metrics([trajectory(prompt_id="a/1")], ["a", "b"])
    assert [*row.values()] == [1.0, 1.0, 3.0, 0.0, None, None], "all batches have the same columns"
    repeated = make_batch([trajectory(), trajectory(), trajectory(group_id="g2")], vocab_size=10)
    assert sample_metrics(repeated, version=6)["duplicates"] == pytest.approx(1 / 3)


def test_a_reward_keeps_all_its_digits() -> None:
    rewards = [0.1, 0.1 + 1e-9]
    sent = [msgspec.msgpack.encode(trajectory(reward=reward)) for reward in rewards]
    batch = make_batch([msgspec.msgpack.decode(one, type=Trajectory) for one in sent], 10)
    assert batch.rewards.tolist() == rewards
    expected = pytest.approx([-5e-10, 5e-10], rel=1e-6)
    assert dr_grpo(batch.rewards, batch.groups).tolist() == expected


def test_a_mismatch_of_no_tokens_is_not_known() -> None:
    behaviour, logprobs = torch.tensor([0.5, 0.5]).log(), torch.tensor([torch.nan, 0.25]).log()
    every, last = torch.tensor([True, True]), torch.tensor([False, True])
    row = mismatch_row(mismatch_sums(logprobs, behaviour, every, last))
    k3 = -0.5 + 0.6931471805599453  # r = 1/2
    assert row["mismatch/k3"] == row["mismatch/k3_on_policy"] == pytest.approx(k3, abs=1e-6)
    none = mismatch_row(mismatch_sums(logprobs, behaviour, ~every, last))
    assert (none["mismatch/k3_on_policy"], none["ess"]) == (None, pytest.approx(1.0))
    nothing = mismatch_row(mismatch_sums(*torch.zeros(2, 0), *torch.zeros(2, 0).bool()))
    assert nothing == dict.fromkeys(none)


VERSION, PER_VERSION = 2, 4


class Together(Ranks):
    """Several ranks of a process, one after the other: the last one sees what all give."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def gather(self, tensor: Tensor) -> Tensor:
        self.given.append(tensor)
        return torch.stack(self.given)


@pytest.fixture(scope="module")
def noisy(directory: Path) -> TrainBatch:
    """A batch with and without tokens of VERSION from the start of their response on."""
    policy, _ = load_policy(directory)
    old, new = (noisy_trajectories(policy, version=one) for one in (VERSION, VERSION + 1))
    return make_batch(old[:6] + new[6:], policy.config.vocab_size)


Pass = tuple[int, Tensor, TokenInputs, TokenLosses, Tensor]  # update, tokens of it, ..., loss


def passes(batch: TrainBatch, parts: list[Tensor]) -> list[Pass]:
    """A pass for each sample of each update."""
    generator = torch.Generator().manual_seed(1)
    made: list[Pass] = []
    for update, sample in ((u, sample) for u, part in enumerate(parts) for sample in part):
        source = (batch.tokens.owner == sample).nonzero().squeeze(1)
        count, behaviour = len(source), batch.behaviour[source]
        logprobs = behaviour + 0.4 * torch.randn(count, generator=generator)
        tokens = TokenInputs(
            logprobs=logprobs,
            behaviour=behaviour,
            proximal=behaviour,
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
        made.append((update, source, tokens, losses, losses.losses.sum()))
    return made


def by_token(batch: TrainBatch, found: Tensor | None, done: list[Pass], cuts: int) -> Row:
    """The row of all tokens of all passes; `found` are logprobs of a pass before them."""
    updates, sources, tokens, losses, totals = zip(*done, strict=True)
    source, last = torch.cat(sources), max(updates)
    update = torch.cat([torch.full_like(s, u) for u, s in zip(updates, sources, strict=True)])
    pi, mu = torch.cat([one.logprobs for one in tokens]).double(), batch.behaviour[source].double()
    age = ((VERSION - batch.oldest[source]) * PER_VERSION + update).double()
    first = update < (1 if found is None else cuts)
    d = ((pi if found is None else found[source].double()) - mu)[first]
    k3, fresh = d.exp() - d - 1, batch.leading(VERSION)[source][first]
    values = {
        "loss": torch.stack(totals).sum() / (last + 1),
        "entropy": torch.cat([one.entropy for one in tokens]).mean(),
        "kl": torch.cat([one.kl for one in losses]).mean(),
        "ratio/max": torch.cat([one.ratio for one in losses]).max(),
        "clip_fraction": torch.cat([one.clipped for one in losses]).double().mean(),
        "mask_fraction": torch.cat([~one.kept for one in losses]).double().mean(),
        "ess_last": share((pi - mu)[update == last].exp()),
        "staleness/updates/mean": age.mean(),
        "staleness/updates/max": age.max(),
        "mismatch/k1": -d.mean(),
        "mismatch/k3": k3.mean(),
        "mismatch/chi2": (2 * d).exp().mean() - 1,
        "mismatch/k3_on_policy": k3[fresh].mean(),
        "ess": share(d.exp()),
        "outliers": torch.zeros(()),
    }
    return {name: float(value) for name, value in values.items()}


def share(weight: Tensor) -> Tensor:
    """Return (sum r)^2 / (N sum r^2)."""
    return weight.sum().square() / (len(weight) * weight.square().sum())


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("cuts", "epochs"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("spent", [False, True], ids=["no pass before", "a pass before"])
def test_sums_say_what_the_tokens_say(
    noisy: TrainBatch, world: int, cuts: int, epochs: int, spent: bool
) -> None:
    samples = torch.arange(1, len(noisy.trajectories))  # the first gets no pass
    parts = minibatches(samples, cuts, epochs, "7")
    found = noisy.behaviour + 0.1 * torch.arange(len(noisy.behaviour)).cos() if spent else None
    ranks = [
        LossMetrics(noisy, found, cuts, len(parts), version=VERSION, per_version=PER_VERSION)
        for _ in range(world)
    ]
    done = passes(noisy, parts)
    for number, one in enumerate(done):
        ranks[number % world].add(*one, torch.zeros(len(one[1]), dtype=torch.bool))
    together = Together()
    *_, row = [metrics.summary(together) for metrics in ranks]
    expected = by_token(noisy, found, done, cuts)
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def test_outliers_count_as_masked_and_in_no_ratio(noisy: TrainBatch) -> None:
    parts = minibatches(torch.arange(len(noisy.trajectories)), 1, 1, "7")
    rows: list[Row] = []
    for spoil in (False, True):
        metrics = LossMetrics(noisy, None, 1, 1, version=VERSION, per_version=1)
        for at, one in enumerate(passes(noisy, parts)):
            _, source, tokens, losses, _ = one
            out = torch.zeros(len(source), dtype=torch.bool)
            out[0] = at == 0
            if spoil and at == 0:
                tokens.logprobs[0], losses.ratio[0] = torch.nan, torch.inf
            metrics.add(*one, out)
        rows.append(metrics.summary(Ranks()))
    assert rows[0] == rows[1], "whatever they are"
    assert rows[0]["outliers"] == 1
    assert (rows[0]["mask_fraction"] or 0) * len(noisy.behaviour) >= 1
