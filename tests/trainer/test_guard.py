"""Tokens, and updates, that would do harm are left out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.rank_bench import QUICK, configured, make_batches
from torch import Tensor

from umbra.proto.errors import DivergedError
from umbra.proto.records import Trajectory, pack_float32
from umbra.services.config.presets import ObjectiveSpec
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import REASONS, Learner
from umbra.services.trainer.loop import SkipLimit
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.objective import TokenLosses
from umbra.services.trainer.objectives.terms import Sequences
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import Guard, PolicyUpdate

BATCHES = make_batches(2)


def improbable(batch: list[Trajectory], samples: int, tokens: int = 10**6) -> list[Trajectory]:
    """The same, but the generator gave next to no probability to some tokens of some samples."""

    def spoilt(count: int, improbable: int) -> bytes:
        return pack_float32([-60.0] * improbable + [-4.6] * (count - improbable))

    counts = [len(t.logprobs) // 4 for t in batch]
    return [
        msgspec.structs.replace(t, logprobs=spoilt(n, min(n, tokens if at < samples else 0)))
        for at, (t, n) in enumerate(zip(batch, counts, strict=True))
    ]


def harm(
    learner: Learner, update: PolicyUpdate, monkeypatch: pytest.MonkeyPatch, kind: str
) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Have the next batch do harm of this kind; what it becomes."""
    objective, backward = update._objective, learner.backward

    def nan(*args: Any) -> TokenLosses:
        result = objective(*args)
        return dataclasses.replace(result, losses=result.losses * torch.nan)

    match kind:
        case "loss":
            monkeypatch.setattr(update, "_objective", nan)
        case "gradient":
            monkeypatch.setattr(
                learner, "backward", lambda loss, **how: backward(loss * 1e38 * 1e10, **how)
            )
        case _:
            return lambda batch: improbable(batch, len(batch))
    return lambda batch: batch


def state(learner: Learner) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in learner.state().tensors().items()}


def trainer(directory: Path, **keys: Any) -> tuple[Learner, PolicyUpdate]:
    config = configured(directory, **{**QUICK, **keys})
    learner = Learner(load_policy(directory)[0], config.trainer, 4)
    return learner, PolicyUpdate(config, learner)


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("kind", REASONS)
def test_harm_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, minibatches: int
) -> None:
    learner, update = trainer(directory, minibatches=minibatches)
    model = learner.model

    def train(batch: list[Trajectory], version: int) -> Row:
        row = update(make_batch(batch, model.config.vocab_size), version, lambda: True)
        assert row is not None
        return row

    assert train(BATCHES[0], 0)["skipped"] == 0
    before = state(learner)
    with monkeypatch.context() as patch:
        spoil = harm(learner, update, patch, kind)
        row = train(spoil(BATCHES[1]), 1)
    assert row["skipped"] == 1
    assert [row[f"skipped/{reason}"] for reason in REASONS] == [float(r == kind) for r in REASONS]
    after = state(learner)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert train(BATCHES[1], 1)["skipped"] == 0, "the next one is made as if nothing had been"
    moved = state(learner)
    assert any(not torch.equal(before[name], moved[name]) for name in before)


def spoiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch, value: float | None, **keys: Any
) -> tuple[dict[str, Tensor], Row]:
    """Weights after a batch whose first learned token is an outlier, or has this logprob."""
    learner, update = trainer(directory, optimizer="sgd", betas=[0.0, 0.9], **keys)
    batch = BATCHES[0]
    if value is None:
        batch = improbable(batch, 1, 1)
    else:
        score = learner.score

        def one(micro: MicroBatch, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            logprobs, entropy = score(micro, *args, **kwargs)
            return torch.where(micro.source == 0, value, logprobs), entropy

        monkeypatch.setattr(learner, "score", one)
        batch = improbable(batch, 0)
    row = update(make_batch(batch, learner.model.config.vocab_size), 0, lambda: True)
    assert row is not None
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}, row


@pytest.mark.parametrize(
    "objective", ["ppo", "decoupled", "gspo", "geometric", "tis_opsm", "cispo"]
)
def test_an_outlier_is_left_out_alone_or_with_its_sequence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """Whatever it is, it has no part in the update; all the others have."""
    keys: dict[str, Any] = {"objective": objective, "kl_coef": 0.0, "minibatches": 2}
    if objective == "geometric":
        keys |= {"objective": "tis", "mask": objective, "mask_low": 0.1, "mask_high": 10.0}
    weights, row = spoiled(directory, monkeypatch, None, **keys)
    sequence = objective in ("gspo", "geometric", "tis_opsm")
    whole = sum(BATCHES[0][0].loss_mask)
    assert whole > 1
    assert row["outliers"] == (whole if sequence else 1)
    assert row["skipped"] == 0
    clean, _ = trainer(directory)
    start = dict(clean.model.named_parameters())
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    for value in (torch.nan, torch.inf, -torch.inf):
        with monkeypatch.context() as patch:
            again, other = spoiled(directory, patch, value, **keys)
        assert other["outliers"] == row["outliers"]
        assert other["skipped"] == 0
        assert other["loss"] == pytest.approx(row["loss"])
        for name, tensor in weights.items():
            torch.testing.assert_close(again[name], tensor)


def test_the_bound_can_be_moved_and_taken_away() -> None:
    pieces, ranks = ObjectiveSpec(), Ranks()
    behaviour = torch.tensor([-3.0, -9.0])
    one = Sequences(torch.zeros(2, dtype=torch.int64), 1)
    for bound, found in ((100.0, [False, True]), (1000.0, [False] * 2), (0.0, [False] * 2)):
        guard = Guard(bound, pieces, ranks)
        out = guard.outliers(torch.tensor([-3.0, -3.0]), behaviour, one)
        assert out.tolist() == found, "e^6 = 403"
        guard.see(torch.tensor(1.0), out)
        assert guard.verdict() == "", "one is left"
    whole = Guard(100.0, ObjectiveSpec(ratio_level="sequence"), ranks)
    out = whole.outliers(torch.tensor([-3.0, -3.0]), behaviour, one)
    assert out.tolist() == [True, True]
    whole.see(torch.tensor(0.0), out)
    assert whole.verdict() == "outliers", "nothing is left"


def row(skipped: float | None, reason: str = "gradient") -> Row:
    shares: Row = {f"skipped/{name}": skipped if name == reason else 0.0 for name in REASONS}
    return {"skipped": skipped, **shares}


def test_patience_ends_with_a_sentence() -> None:
    patience = SkipLimit(3)
    assert patience.see(row(1.0), 1) == "its gradient is not finite"
    assert patience.see(row(1.0, "loss"), 2) == "its loss is not finite"
    assert patience.see(row(0.0), 3) == ""
    assert patience.see(row(None), 4) == "", "nothing to update"
    assert patience.see(row(0.5), 5) == "its gradient is not finite", "a part of the minibatches"
    patience.see(row(1.0), 6)
    patience.see(row(1.0), 7)
    with pytest.raises(DivergedError, match=r"stopped at step 8: .* last 3 batches .* of step 5"):
        patience.see(row(1.0), 8)
