"""Parameters, moments and activations in less memory: the learned weights stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.rank_bench import Trained, make_batches, train
from torch.autograd import graph

from umbra.proto.errors import UsageError
from umbra.proto.records import Trajectory
from umbra.services.config import TrainerConfig
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy

ADAMW = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    AcceleratorState._reset_state()  # a process has one, but here
    yield
    AcceleratorState._reset_state()


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return make_batches(2)


def same(one: Trained, other: Trained) -> bool:
    equal = (torch.equal(one.weights[name], other.weights[name]) for name in other.weights)
    return [row["loss"] for row in one.rows] == [row["loss"] for row in other.rows] and all(equal)


@pytest.mark.parametrize("offload", ["optimizer", "activations", "all"])
def test_offload_changes_nothing(
    directory: Path,
    batches: list[list[Trajectory]],
    offload: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[bool] = []

    class Counted(graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            passes.append(pin_memory)
            super().__init__(pin_memory)

    monkeypatch.setattr(sharding, "save_on_cpu", Counted)
    keys = {**ADAMW, "activation_checkpointing": True}
    plain = train(directory, batches, Ranks(), **keys)
    assert not passes
    found = train(directory, batches, Ranks(), **keys, offload=offload)
    assert same(found, plain)
    assert bool(passes) == (offload != "optimizer")


def test_bf16_weights_learn_as_float32_ones_do(
    directory: Path, batches: list[list[Trajectory]]
) -> None:
    keys: dict[str, Any] = {"precision": "bf16"}
    plain = train(directory, batches, Ranks(), **keys)
    found = train(directory, batches, Ranks(), **keys, weights="bf16")
    for one, other in zip(found.rows, plain.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05, abs=0.01)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
    start = load_policy(directory)[0].state_dict()
    for name, tensor in found.weights.items():
        moved = (tensor - start[name]).norm()
        assert (tensor - plain.weights[name]).norm() < 0.1 * moved + 1e-6, name


def test_steps_too_small_for_bf16_add_up(directory: Path) -> None:
    """The float32 copies are exported; rounded, they score and are published."""
    config = TrainerConfig(
        device="cpu", weights="bf16", precision="bf16", learning_rate=1e-6, warmup_steps=0
    )
    model, _, files = open_policy(directory)
    learner = Learner(model, config, 1, files=files)
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    before = load_policy(directory)[0].state_dict()
    assert all(torch.equal(t, before[name]) for name, t in learner.weights().items()), "not rounded"
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner._master_weights.collect()
    learner.update(0)
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(tensor, before[name] - 1e-6, rtol=0, atol=2e-7)
        assert torch.equal(learner.model.get_parameter(name), tensor.bfloat16())


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"weights": "bf16"}, "trainer.weights = bf16 needs trainer.precision = bf16"),
        ({"offload": "all"}, "needs trainer.activation_checkpointing = true"),
    ],
)
def test_what_auto_turns_into_is_refused_too(
    directory: Path, keys: dict[str, Any], told: str
) -> None:
    """On a CPU `auto` computes in float32 and recomputes nothing."""
    with pytest.raises(UsageError, match=told):
        Learner(load_policy(directory)[0], TrainerConfig(device="cpu", **keys), 1)
