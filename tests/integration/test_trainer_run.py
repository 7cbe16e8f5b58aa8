"""Whole runs by `umbra up` whose trainer has two ranks: hub, buffer and generator for real."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.whole_runs import Up
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.buffer.samples.journal import make_group
from umbra.services.buffer.store import LmdbStore
from umbra.services.config.loader import load_config
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

QUIET_S = 150.0
RANKS = "trainer.ranks=2"


def batch(folder: Path, step: int) -> list[Trajectory]:
    """Return the trajectories of `step` from the run's store."""
    with closing(LmdbStore(folder / "store")) as store:
        groups = msgspec.msgpack.decode(store.get(f"b/{step}"))["groups"]
        keys = [f"t/{s.sample_id}" for group in map(make_group, groups) for s in group.samples]
        return [msgspec.msgpack.decode(one, type=Trajectory) for one in store.get_all(keys)]


def test_two_ranks_learn_what_one_would_have_learned(project: Path, up: Up) -> None:
    """1. A run with two ranks. 2. One process learns from the very same batches. Result: equal."""
    # Plain descent: Adam would turn rounding in near-zero gradients into full steps.
    descent = ("trainer.optimizer=sgd", "trainer.learning_rate=0.1")
    process = up(RANKS, "run.steps=5", *descent, quiet_s=QUIET_S)
    summary, folder = process.finish(), process.run_dir
    assert summary["mismatch_k3_on_policy"] < 1e-6, "the generators have the ranks' weights"
    assert set(summary["seconds"]["services"]) == {
        "buffer", "weight-hub", "trainer", "generator-0",
    }  # fmt: skip
    torch.set_num_threads(1)
    config = load_config(folder / "config.json", environ={})
    assert config.trainer.ranks == 2
    model, _ = load_policy(project / "model")
    learner = Learner(model, config.trainer, config.run.steps)
    update = PolicyUpdate(config, learner)
    rows = process.steps()
    assert len(rows) == 5
    for version, row in enumerate(rows):
        trajectories = batch(folder, version + 1)
        assert len(trajectories) == 16
        alone = update(make_batch(trajectories, model.config.vocab_size), version, lambda: True)
        assert alone is not None
        for key in ("loss", "grad_norm", "entropy", "clip_fraction", "mismatch/k1", "ess"):
            assert row[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), (version, key)
    exported = load_file(folder / "model" / "model.safetensors")
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.timeout(300)
def test_an_adapter_survives_every_restart(up: Up) -> None:
    """1. A run publishes an adapter alone. 2. Generator, hub and trainer are killed, one by one.

    Result: each is started again. The generator joins late and gets the newest version on its own
    base, the hub gets it again, and the trainer goes on from its checkpoint.
    """
    keys = ("trainer.lora_rank=2", "trainer.learning_rate=0.02", "trainer.lora_publish=adapter")
    process = up(*keys, "run.steps=24", "checkpoint.every=1", quiet_s=QUIET_S)
    services = ("generator-0", "weight-hub", "trainer")
    for name in services:
        process.until_step(len(process.steps()) + 2)
        process.kill(name)
    summary = process.finish()
    assert summary["restarts"] == dict.fromkeys(services, 1)
    assert summary["ledger"]["trained"] == 24 * 16
    assert summary["mismatch_k3_on_policy"] < 1e-6
