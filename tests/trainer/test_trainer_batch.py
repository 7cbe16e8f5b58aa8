"""Trajectories become tensors; metrics of a batch are the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.noisy_batch import noisy_trajectories
from fakes.trajectories import trajectory as made
from torch import Tensor

from umbra.proto.records import Sampling, Trajectory, VersionSpan
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import (
    LossMetrics,
    Row,
    mismatch_row,
    mismatch_sums,
    sample_metrics,
)
from umbra.services.trainer.objectives.advantages import dr_grpo
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import Sequences, ratio
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import minibatches

COLUMNS = ("update", "logprob", "entropy", "ratio", "clipped", "masked", "kl")


class TokenTable:
    """Collects the passes of a batch, of all ranks.

    Args:
        batch: M learned tokens.
        found: logprobs under the weights that the batch found, [M], where a pass was spent on them.
        parts: how many optimizer steps an epoch is cut into.
        updates: optimizer steps of all epochs.
    """

    def __init__(self, batch: TrainBatch, found: Tensor | None, parts: int, updates: int) -> None:
        self._batch = batch
        self._found = found
        self._per_epoch = parts
        self._updates = updates
        self._parts: list[tuple[Tensor, Tensor]] = []  # which tokens [N], their columns [7, N]
        self._losses: list[Tensor] = []
        self._knows_kl = False

    def add(
        self, update: int, source: Tensor, tokens: TokenInputs, result: TokenLosses, loss: Tensor
    ) -> None:
        """Keep a micro-batch's results, without their graph; `source` names its tokens."""
        now = tokens.logprobs.detach()
        columns = (
            torch.full_like(now, update + 1.0),  # 0: a token that no update saw
            now,
            tokens.entropy.detach(),
            result.ratio,
            result.clipped,
            ~result.kept,
            torch.zeros_like(now) if result.kl is None else result.kl,
        )
        # A row of the table for each token and epoch.
        where = source + update // self._per_epoch * len(self._batch.behaviour)
        self._parts.append((where, torch.stack([column.to(now) for column in columns])))
        self._losses.append(loss.detach())
        self._knows_kl = result.kl is not None

    def summary(self, version: int, per_version: int) -> Row:
        epochs = self._updates // self._per_epoch
        table = torch.zeros(len(COLUMNS), epochs * len(self._batch.behaviour))
        for source, columns in self._parts:
            table[:, source] = columns.float().cpu()
        loss = torch.stack(self._losses).double().sum()
        seen = table[0] > 0
        column: dict[str, Tensor] = dict(zip(COLUMNS, table[:, seen], strict=True))
        row: Row = {
            "loss": float(loss) / self._updates,
            "entropy": float(column["entropy"].mean()),
            "ratio/max": float(column["ratio"].max()),
        }
        if self._knows_kl:
            row["kl"] = float(column["kl"].mean())
        for name, flag in (("clip_fraction", "clipped"), ("mask_fraction", "masked")):
            row[name] = float(column[flag].mean())
        behaviour = self._batch.behaviour
        last = table[0] == self._updates
        sampled = behaviour.repeat(epochs)[last].double()
        row["ess_last"] = ess(ratio(table[1, last].double(), sampled))
        age = (version - self._batch.oldest).double().repeat(epochs) * per_version + table[0] - 1
        row["staleness/updates/mean"] = float(age[seen].mean())
        row["staleness/updates/max"] = float(age[seen].max())
        first, logprobs = table[:2, : len(behaviour)]
        unchanged = first == 1
        if self._found is not None:
            unchanged, logprobs = first > 0, self._found
        return row | mismatch(
            logprobs[unchanged], behaviour[unchanged], self._batch.leading(version)[unchanged]
        )


def mismatch(logprobs: Tensor, behaviour: Tensor, on_policy: Tensor) -> Row:
    """k1, k3, chi2 and the effective share of samples."""
    log_ratio = (logprobs - behaviour).double()
    weight = ratio(logprobs.double(), behaviour.double())
    k3 = torch.expm1(log_ratio.clamp(max=20.0)) - log_ratio
    return {
        "mismatch/k1": float(-log_ratio.mean()),
        "mismatch/k3": float(k3.mean()),
        "mismatch/chi2": float(weight.square().mean()) - 1,
        "mismatch/k3_on_policy": float(k3[on_policy].mean()) if bool(on_policy.any()) else None,
        "ess": ess(weight),
    }


def ess(weight: Tensor) -> float:
    """(sum r)^2 / (N sum r^2)."""
    return float(weight.sum().square() / (weight.numel() * weight.square().sum()))


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
    repeated = make_batch([trajectory(), trajectory(), trajectory(group_id="g2")], vocab_size=10)
    assert sample_metrics(repeated, version=6)["duplicates"] == pytest.approx(1 / 3)


def test_a_reward_keeps_all_its_digits() -> None:
    rewards = [0.1, 0.1 + 1e-9]
    sent = [msgspec.msgpack.encode(trajectory(reward=reward)) for reward in rewards]
    batch = make_batch([msgspec.msgpack.decode(one, type=Trajectory) for one in sent], 10)
    assert batch.rewards.tolist() == rewards
    expected = pytest.approx([-5e-10, 5e-10], rel=1e-6)
    assert dr_grpo(batch.rewards, batch.groups).tolist() == expected


def test_mismatch_by_hand() -> None:
    behaviour = torch.tensor([0.5, 0.5]).log()
    logprobs = torch.tensor([1.0, 0.25]).log()  # ratios 2 and 1/2
    every, last = torch.tensor([True, True]), torch.tensor([False, True])
    row = mismatch_row(mismatch_sums(logprobs, behaviour, last, every))
    ln2 = 0.6931471805599453
    assert row["mismatch/k1"] == pytest.approx(0.0, abs=1e-6)
    assert row["mismatch/k3"] == pytest.approx(((1 - ln2) + (-0.5 + ln2)) / 2, abs=1e-6)
    assert row["mismatch/k3_on_policy"] == pytest.approx(-0.5 + ln2, abs=1e-6)
    assert row["ess"] == pytest.approx(2.5**2 / (2 * 4.25), abs=1e-6)
    none = mismatch_row(mismatch_sums(logprobs, behaviour, ~every, every))
    assert none["mismatch/k3_on_policy"] is None
    nothing = mismatch_row(mismatch_sums(*torch.zeros(2, 0), *torch.zeros(2, 0).bool()))
    assert nothing == dict.fromkeys(none)
    spoilt = torch.tensor([torch.nan, 0.25]).log()
    one = mismatch_sums(spoilt, behaviour, every, last)
    assert mismatch_row(one)["mismatch/k3"] == pytest.approx(-0.5 + ln2, abs=1e-6)


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
