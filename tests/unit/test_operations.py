"""What an update costs, counted and measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.noisy_batch import noisy_trajectories
from torch.utils.flop_counter import FlopCounterMode

from umbra.services.modeling.packing import pack
from umbra.services.runtime.config import Trainer
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import peak_memory_gib, speed_metrics
from umbra.services.trainer.operations import Operations
from umbra.services.trainer.policy import load_policy


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_what_torch_counts(shared: bool, tmp_path: Path) -> None:
    """Attention is little here, of which torch counts the masked half as well."""
    make_model(tmp_path / "model", hidden=64, ff=192)
    learner = Learner(load_policy(tmp_path / "model")[0], Trainer(device="cpu", threads=1), 1)
    batch = make_batch(noisy_trajectories(learner.model, groups=2), 1000)
    counted = 0.0
    with FlopCounterMode(display=False) as measured:
        for micro in pack(batch.tokens, pack_tokens=32, micro_tokens=64, share_prompts=shared):
            # Torch counts padding too.
            fed = micro.input_ids.numel() / micro.tokens
            counted += learner.operations.update(micro) * fed
            logprobs, _ = learner.score(micro, batch.temperature[micro.source], with_entropy=False)
            learner.backward(logprobs.sum())
    assert counted == pytest.approx(measured.get_total_flops(), rel=0.1)


def test_a_sequence_alone_by_hand(tmp_path: Path) -> None:
    """Five tokens are fed of six; the keys that they attend to are 1 + 2 + 3 + 4 + 5."""
    make_model(tmp_path / "model")
    learner = Learner(load_policy(tmp_path / "model")[0], Trainer(device="cpu", threads=1), 1)
    batch = make_batch(noisy_trajectories(learner.model, groups=1, size=1), 1000)
    (micro,) = pack(batch.tokens, pack_tokens=64, micro_tokens=64)
    fed, learned = micro.tokens, len(batch.behaviour)
    assert micro.segment is None
    cost = Operations(body=1000, head=100, attention=10)
    keys = fed * (fed + 1) / 2
    assert cost.update(micro) == 6 * 1000 * fed + 6 * 100 * learned + 12 * 10 * keys


def test_speed() -> None:
    assert speed_metrics(600.0, 8e12, 2.0, 16e12) == {
        "train_tokens_per_s": 300.0, "tflops": 4.0, "mfu": 0.25,
    }  # fmt: skip
    assert speed_metrics(600.0, 8e12, 2.0, 0.0)["mfu"] is None
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000
