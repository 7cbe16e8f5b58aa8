"""A trainer on a GPU: what of it stays on the host, exact resume, times of phases."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_bench import Trainer, make_batches, noisy_trajectories, train
from trainer.test_checkpoints import same

from umbra.services.config import TrainerConfig
from umbra.services.modeling.packing import pack
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy
from umbra.services.trainer.speed import Phases

pytestmark = pytest.mark.gpu


def test_weights_are_read_straight_to_the_gpu(tiny_model_dir: Path) -> None:
    plain = load_policy(tiny_model_dir)[0]
    model, _, files = open_policy(tiny_model_dir)
    learner = Learner(model, TrainerConfig(device="cuda"), 1, files=files)
    for name, parameter in learner.model.named_parameters():
        assert parameter.is_cuda
        assert torch.equal(parameter.cpu(), plain.get_parameter(name)), name
    assert all(buffer.is_cuda for buffer in learner.model.buffers())


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_what_is_on_the_host_learns_the_same(tiny_model_dir: Path, offload: str) -> None:
    keys = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-4, "device": "cuda"}
    plain, found = (
        train(tiny_model_dir, make_batches(2), Ranks(), activation_checkpointing=True, **more)
        for more in (keys, {**keys, "offload": offload})
    )
    for one, other in zip(found.rows, plain.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, plain.weights[name], atol=2e-4, rtol=1e-3)


def test_an_optimizer_on_the_host_leaves_the_gpu_its_memory(tiny_model_dir: Path) -> None:
    held: dict[str, int] = {}
    for offload in ("none", "optimizer"):
        config = TrainerConfig(
            device="cuda", precision="bf16", weights="bf16", offload=offload, warmup_steps=0
        )
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model, _, files = open_policy(tiny_model_dir)
        learner = Learner(model, config, 1, files=files)
        batch = make_batch(noisy_trajectories(load_policy(tiny_model_dir)[0]), 1000)
        for micro in pack(batch.tokens, pack_tokens=256, micro_tokens=4096):
            logprobs, _ = learner.score(micro, batch.temperature[micro.source])
            learner.backward(-logprobs.mean())
        learner.update(0)
        held[offload] = torch.cuda.memory_allocated() - before
        del learner, model
    assert held["optimizer"] < held["none"] / 3


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_going_on_is_exact(tiny_model_dir: Path, tmp_path: Path, precision: str) -> None:
    """Pinned copies, and the state of the GPU's generator."""
    keys: dict[str, Any] = {"device": "cuda", "precision": precision, "deterministic": True}
    with closing(Trainer(tiny_model_dir, tmp_path / "whole", **keys)) as whole:
        expected = whole.train(4).learner.weights()
    with closing(Trainer(tiny_model_dir, tmp_path / "parts", **keys)) as first:
        first.train(2).save()
        torch.cuda.manual_seed(3)
    with closing(Trainer(tiny_model_dir, tmp_path / "parts", **keys)) as again:
        assert again.step == 2
        assert same(again.train(4).learner.weights(), expected)
    torch.use_deterministic_algorithms(False)


def test_phases_wait_for_the_kernels() -> None:
    """A call returns at once; its phase has the time of its kernels, and the parts add up."""
    phases = Phases(torch.device("cuda"))
    a = torch.randn(8192, 8192, device="cuda")
    phases.take()
    with phases("product"):
        for _ in range(8):
            torch.mm(a, a)
    with phases("nothing"):
        pass
    found = phases.take()
    assert found["product"] > 0.9 * found["step"]
    assert sum(found[name] for name in ("product", "nothing", "other")) == pytest.approx(
        found["step"]
    )
