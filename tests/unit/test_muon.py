"""Muon over the matrices of the layers: the same as torch's, and what it is used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import make_batches
from torch import nn

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.feasibility import check_feasible
from umbra.services.config.loader import load_config
from umbra.services.modeling.packing import pack
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.muon import Muon, orthogonal
from umbra.services.trainer.policy import load_policy

RATE = 0.1
CONFIG = TrainerConfig(learning_rate=RATE, weight_decay=0.1, optimizer="muon", device="cpu")


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=source)) for shape in shapes]


def step(optimizers: list[torch.optim.Optimizer], own: list[nn.Parameter], seed: int) -> None:
    """One update with the gradients of `seed`."""
    source = torch.Generator().manual_seed(seed)
    for parameter in own:
        parameter.grad = torch.randn(parameter.shape, generator=source)
    for optimizer in optimizers:
        optimizer.step()


def test_it_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    shapes = (24, 16), (16, 40), (16,)
    own, theirs = parameters(*shapes), parameters(*shapes)
    ours = Muon(own[:2], own[2:], CONFIG)
    torchs = torch.optim.Muon(
        theirs[:2], lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(theirs[2:], lr=RATE, betas=CONFIG.betas, weight_decay=0.1)
    for seed in range(4):
        if seed == 2:
            # A state that is loaded takes the place of the one that it knew.
            ours.load_state_dict(ours.state_dict())
        for group in (*ours.param_groups, *torchs.param_groups, *adamw.param_groups):
            group["lr"] = RATE / (1 + seed)
        before = [p.detach().clone() for p in own]
        step([ours], own, seed)
        step([torchs, adamw], theirs, seed)
        for one, other, old in zip(own, theirs, before, strict=True):
            # The matrices are rounded to bfloat16, in both; an update has elements of 0.2 RATE.
            torch.testing.assert_close(one, other, rtol=0, atol=0.004 * RATE)
            assert (one - old).abs().mean() > 0.02 * RATE


def test_each_expert_is_a_matrix() -> None:
    (together,) = parameters((3, 24, 16))
    apart = [nn.Parameter(expert.detach().clone()) for expert in together]
    (spare,) = parameters((1,))
    one, many = Muon([together], [spare], CONFIG), Muon(apart, [spare], CONFIG)
    together.grad = torch.randn(3, 24, 16)
    for expert, gradient in zip(apart, together.grad, strict=True):
        expert.grad = gradient.clone()
    one.step()
    many.step()
    torch.testing.assert_close(together.detach(), torch.stack([*apart]).detach(), rtol=0, atol=2e-4)


def test_singular_values_become_about_one() -> None:
    source = torch.Generator().manual_seed(1)
    for shape in ((32, 20), (20, 32), (2, 24, 24)):
        found = orthogonal(torch.randn(shape, generator=source).bfloat16()).float()
        values = torch.linalg.svdvals(found)
        assert values.max() < 1.3
        assert values.median() > 0.6
    assert not orthogonal(torch.zeros(4, 4).bfloat16()).any()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe", "gpt-oss"])
def test_it_is_used_for_the_matrices_of_layers(architecture: str, tmp_path: Path) -> None:
    """Not for embeddings, the output layer, norms, biases (gpt-oss has one for each expert)."""
    model = load_policy(ARCHITECTURES[architecture].write(tmp_path / "model"))[0]
    learner = Learner(model, CONFIG, steps=1)
    batch = make_batch(make_batches(1)[0], 100)
    for micro in pack(batch.tokens, pack_tokens=64, micro_tokens=1000):
        learner.backward(learner.score(micro, batch.temperature[micro.source])[0].sum())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner.update(0)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    state = learner.parts()["optimizer"].tensors()
    matrices = {name for name in state if name.endswith(".momentum_buffer")}
    assert matrices
    for name in matrices:
        assert ".layers." in name
        assert "norm" not in name and "bias" not in name
    others = {name.removesuffix(".exp_avg") for name in state if name.endswith(".exp_avg")}
    found = {name.removesuffix(".momentum_buffer") for name in matrices}
    assert found | others == {name for name, _ in model.named_parameters()}
    assert not found & others
    projections = {name.split(".")[-2] for name in found if "self_attn" in name}
    assert projections == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name for name in found if "self_attn" in name} <= changed
    assert any(".mlp." in name for name in found)


def test_it_trains_no_adapter(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=32, ff=64)
    config = TrainerConfig(optimizer="muon", lora_rank=2, device="cpu")
    with pytest.raises(UsageError, match=r"set trainer\.lora_rank = 0, or trainer\.optimizer"):
        Learner(load_policy(tmp_path / "model")[0], config, steps=1)


@pytest.mark.parametrize("key", [{"offload": "optimizer"}, {"offload": "all"}])
def test_it_updates_no_copies(key: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=32, ff=64)
    keys = {"optimizer": "muon", "activation_checkpointing": True, **key}
    config = load_config(
        overrides=[f"trainer.{name}={str(value).lower()}" for name, value in keys.items()],
        environ={},
    )
    with pytest.raises(UsageError, match="muon updates float32 weights where they are"):
        check_feasible(config)
    trainer = TrainerConfig(device="cpu", **keys)
    with pytest.raises(UsageError, match="muon updates float32 weights where they are"):
        Learner(load_policy(tmp_path / "model")[0], trainer, steps=1)
