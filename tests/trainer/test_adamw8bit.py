"""AdamW with moments in 8 bits: close to float32 over many steps, sparse gradients included."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.trainer.optimizer import make_optimizer, set_learning_rate

pytest.importorskip("torchao")
from umbra.services.trainer.adamw8bit import BLOCK, AdamW8bit, in_8_bits

RATE = 1e-3
STEPS = 200


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def descend(kind: Any, steps: int = STEPS) -> tuple[list[float], float, nn.Parameter]:
    """Losses, the largest step of a weight in learning rates, and the embedding at the end.

    Four of 32 rows of the embedding have a gradient in a step, and its columns are of sizes that
    are up to 1000 times apart: small first moments outlive second ones that are rounded to 0.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Parameter(0.1 * torch.randn(32, 2 * BLOCK, generator=generator))
    head = nn.Parameter(0.05 * torch.randn(16, 2 * BLOCK, generator=generator))
    aim = torch.randn(32, 16, generator=generator)
    sizes = 10 ** (-3 * torch.rand(2 * BLOCK, generator=generator))
    config = TrainerConfig(optimizer=kind, learning_rate=RATE, betas=(0.9, 0.95))
    optimizer = make_optimizer([embedding, head], config)
    losses: list[float] = []
    largest = 0.0
    for _ in range(steps):
        ids = torch.randint(0, 32, (4,), generator=generator)
        loss = ((embedding[ids] * sizes @ head.T - aim[ids]) ** 2).mean()
        loss.backward()
        before = embedding.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        largest = max(largest, float((embedding.detach() - before).abs().max()) / RATE)
    return losses, largest, embedding


def test_it_learns_as_float32_moments_do() -> None:
    expected, largest, exact = descend("adamw")
    found, most, close = descend("adamw8bit")
    assert largest < 1.01
    assert most < 1.5, "learning rates in one step; torchao's own makes 237"
    assert found == pytest.approx(expected, rel=0.02)
    moved = (exact.detach() - descend("adamw", 0)[2]).abs().mean()
    assert (close - exact).abs().mean() < 0.15 * moved
    assert found != expected


def test_what_blocks_do_not_fill_stays_in_float32() -> None:
    shapes = [(5, BLOCK), (3, 4, BLOCK), (6, BLOCK + 1), (2 * BLOCK,), (7, 32)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = AdamW8bit(parameters, RATE, (0.9, 0.95), 0.0)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert [in_8_bits(p.shape) for p in parameters] == [True, True, False, False, False]
    for parameter in parameters:
        state = optimizer.unpack(parameter, optimizer.state[parameter])
        codes = state["exp_avg_sq"].dtype == torch.uint8
        assert codes == in_8_bits(parameter.shape)
        assert state["exp_avg"].shape == parameter.shape
        again = optimizer.unpack(parameter, optimizer.pack(parameter, state))
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)


def test_the_rate_is_set() -> None:
    parameter = nn.Parameter(torch.ones(2, BLOCK))
    optimizer = AdamW8bit([parameter], RATE, (0.9, 0.95), 0.0)
    set_learning_rate(optimizer, 0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2, BLOCK), 0.5))


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("adamw8bit"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match="adamw8bit needs torchao: pip install torchao"):
        make_optimizer([], TrainerConfig(optimizer="adamw8bit"))
