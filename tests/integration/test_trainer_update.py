"""One update of a real policy, cut up in different ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.policy_rollouts import config, rollouts
from torch import Tensor

from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64)
    return path


def updated(directory: Path, **trainer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights after one update on rollouts of slightly different weights, and its row."""
    # Plain descent: Adam would turn rounding in near-zero gradients into full steps.
    plain = {"optimizer": "sgd", "betas": [0.0, 0.9], "learning_rate": 0.1}
    settings = config(directory, **plain | trainer)
    model, _ = load_policy(directory)
    trajectories = rollouts(model.eval(), version=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    learner = Learner(model, settings.trainer, steps=1)
    batch = make_batch(trajectories, model.config.vocab_size)
    row = PolicyUpdate(settings, learner)(batch, 3, lambda: True)
    assert row is not None
    return {k: v.detach().clone() for k, v in model.named_parameters()}, row


@pytest.mark.parametrize("objective", ["ppo", "tis", "decoupled", "naive"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_how_a_batch_is_cut_up_does_not_change_the_update(
    directory: Path, objective: str, aggregation: str
) -> None:
    common = {"objective": objective, "aggregation": aggregation, "minibatches": 2}
    whole, row = updated(directory, **common, pack_tokens=256, micro_tokens=4096)
    pieces, other = updated(directory, **common, pack_tokens=8, micro_tokens=8)
    for name, tensor in whole.items():
        torch.testing.assert_close(pieces[name], tensor, atol=1e-6, rtol=1e-4)
    for key in ("loss", "grad_norm", "mismatch/k3", "ess", "clip_fraction", "entropy"):
        assert other[key] == pytest.approx(row[key], rel=1e-3, abs=1e-6), key
    assert row["updates"] == 2
    assert row["mismatch/k3"] > 1e-4
    assert row["mismatch/k3_on_policy"] is None, "the samples are three versions old"


def test_the_proximal_policy_is_that_before_the_first_update(directory: Path) -> None:
    """With a single update `naive` has ratio 1 everywhere; later updates move away from it."""
    _, one = updated(directory, objective="naive", minibatches=1)
    _, four = updated(directory, objective="naive", minibatches=4, clip_low=1e-5, clip_high=1e-5)
    assert one["clip_fraction"] == 0
    assert four["clip_fraction"] > 0
    assert four["mismatch/k3"] == pytest.approx(one["mismatch/k3"], rel=1e-3)
