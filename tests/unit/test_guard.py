"""Updates that would do harm are left out, with weights and optimizer state as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.rank_bench import as_text, make_batches
from torch import Tensor

from umbra.proto.errors import DivergedError
from umbra.proto.records import Trajectory, pack_float32
from umbra.services.runtime.config_loader import load_config
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.guard import REASONS, Guard, Patience
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.ranks import Ranks
from umbra.services.trainer.update import PolicyUpdate

KEYS = {"warmup_steps": 0, "device": "cpu", "threads": 1, "pack_tokens": 48, "learning_rate": 1e-3}
BATCHES = make_batches(2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64, init_std=0.1)
    return path


def improbable(batch: list[Trajectory]) -> list[Trajectory]:
    """The same, but the generator gave the first token of each sample next to no probability."""
    count = [len(t.logprobs) // 4 for t in batch]
    return [
        msgspec.structs.replace(t, logprobs=pack_float32([-30.0] + [-4.6] * (n - 1)))
        for t, n in zip(batch, count, strict=True)
    ]


def harm(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, kind: str
) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Have the next batch do harm of this kind; what it becomes."""
    score, backward = learner.score, learner.backward

    def nan(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = score(*args, **kwargs)
        return logprobs * torch.nan, entropy

    match kind:
        case "loss":
            monkeypatch.setattr(learner, "score", nan)
        case "gradient":
            monkeypatch.setattr(learner, "backward", lambda loss: backward(loss * 1e38 * 1e10))
        case _:
            return improbable
    return lambda batch: batch


def state(learner: Learner) -> dict[str, Tensor]:
    """Weights and moments."""
    parts = learner.parts()
    return {
        f"{name}/{key}": tensor.detach().clone()
        for name, part in parts.items()
        for key, tensor in part.tensors().items()
    }


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("kind", REASONS)
def test_harm_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, minibatches: int
) -> None:
    keys = {**KEYS, "minibatches": minibatches}
    overrides = [f"trainer.{key}={as_text(value)}" for key, value in keys.items()]
    config = load_config(overrides=[*overrides, f"model.path={directory}"], environ={})
    model, _ = load_policy(directory)
    learner = Learner(model, config.trainer, 4)
    update = PolicyUpdate(config, learner)

    def train(batch: list[Trajectory], version: int) -> Row:
        row = update(make_batch(batch, model.config.vocab_size), version, lambda: True)
        assert row is not None
        return row

    assert train(BATCHES[0], 0)["skipped"] == 0
    before = state(learner)
    with monkeypatch.context() as patch:
        spoil = harm(learner, patch, kind)
        row = train(spoil(BATCHES[1]), 1)
    assert row["skipped"] == 1
    assert [row[f"skipped/{reason}"] for reason in REASONS] == [float(r == kind) for r in REASONS]
    after = state(learner)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert train(BATCHES[1], 1)["skipped"] == 0, "the next one is made as if nothing had been"
    moved = state(learner)
    assert any(not torch.equal(before[name], moved[name]) for name in before)


def test_the_bound_can_be_moved_and_taken_away() -> None:
    loss, behaviour = torch.tensor(1.0), torch.tensor([-3.0, -9.0])
    for bound, verdict in ((100.0, "ratio"), (1000.0, ""), (0.0, "")):
        guard = Guard(bound, Ranks())
        guard.see(loss, torch.tensor([-3.0, -3.0]), behaviour)
        assert guard.verdict() == verdict, "e^6 = 403"


class OtherRank(Ranks):
    """Another rank has found this."""

    def __init__(self, *found: float) -> None:
        super().__init__()
        self.found = torch.tensor(found)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + self.found


def test_all_ranks_come_to_the_same_verdict() -> None:
    guard = Guard(100.0, OtherRank(0.0, 1.0))
    guard.see(torch.tensor(1.0), torch.zeros(2), torch.zeros(2))
    assert guard.verdict() == "ratio"
    assert Guard(100.0, OtherRank(1.0, 0.0)).verdict() == "loss", "a rank without a pass"


def row(skipped: float | None, reason: str = "gradient") -> Row:
    shares: Row = {f"skipped/{name}": skipped if name == reason else 0.0 for name in REASONS}
    return {"skipped": skipped, **shares}


def test_patience_ends_with_a_sentence() -> None:
    patience = Patience(3)
    assert patience.see(row(1.0), 1) == "its gradient is not finite"
    assert patience.see(row(1.0, "loss"), 2) == "its loss is not finite"
    assert patience.see(row(0.0), 3) == ""
    assert patience.see(row(None), 4) == "", "nothing to update"
    assert patience.see(row(0.5), 5) == "its gradient is not finite", "a part of the minibatches"
    patience.see(row(1.0), 6)
    patience.see(row(1.0), 7)
    with pytest.raises(DivergedError, match=r"stopped at step 8: .* last 3 batches .* of step 5"):
        patience.see(row(1.0), 8)
