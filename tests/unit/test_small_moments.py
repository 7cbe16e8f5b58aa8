"""Moments in bfloat16 and in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from umbra.services.trainer import small_moments
from umbra.services.trainer.small_moments import SmallMomentsAdamW, dequantized, quantized

SHAPES = [(6, 300), (3, 4, 128), (5,), (7, 16)]


def descend(optimizer: Any, parameters: list[nn.Parameter], steps: int = 40) -> list[float]:
    """Losses on the way from the parameters to fixed random ones, with noisy gradients."""
    generator = torch.Generator().manual_seed(1)
    aims = [torch.randn(p.shape, generator=generator) for p in parameters]
    losses: list[float] = []
    for _ in range(steps):
        pairs = zip(parameters, aims, strict=True)
        loss = sum(((p - aim) ** 2).sum() for p, aim in pairs)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        for parameter in parameters:
            assert parameter.grad is not None
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad += 0.3 * noise * parameter.grad.abs().mean()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


KEYS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.01}


@pytest.mark.parametrize(("moments", "close"), [("bf16", 0.01), ("8bit", 0.02)])
def test_it_descends_as_adamw_does(moments: Any, close: float) -> None:
    plain, small = parameters(), parameters()
    expected = descend(torch.optim.AdamW(plain, **KEYS), plain)
    optimizer = SmallMomentsAdamW(small, **KEYS, moments=moments)
    found = descend(optimizer, small)
    assert expected[-1] < expected[0] / 2
    assert found == pytest.approx(expected, rel=close)
    assert found != expected
    wide = optimizer.state[small[0]]
    assert wide["exp_avg"].dtype == (torch.bfloat16 if moments == "bf16" else torch.uint8)
    kept = sum(value.nbytes for value in wide.values()) / small[0].nbytes
    assert kept < (1.01 if moments == "bf16" else 0.52), "bytes of moments by those of weights"


def test_what_stays_in_float32_is_adamw() -> None:
    """Vectors, and matrices of narrow rows: the same formula."""
    plain, small = ([p for p in parameters() if p.shape in ((5,), (7, 16))] for _ in range(2))
    descend(torch.optim.AdamW(plain, **KEYS), plain)
    descend(SmallMomentsAdamW(small, **KEYS, moments="8bit"), small)
    for one, other in zip(plain, small, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_pieces_do_not_change_the_result(moments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = parameters(), parameters()
    descend(SmallMomentsAdamW(whole, **KEYS, moments=moments), whole, 3)
    monkeypatch.setattr(small_moments, "PIECE", 700)
    descend(SmallMomentsAdamW(pieces, **KEYS, moments=moments), pieces, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [40, 256, 700])
def test_eight_bits_are_the_nearest_of_256_values(signed: bool, width: int) -> None:
    """Of the block's largest number, over six decades; a block is 256 numbers of one row."""
    generator = torch.Generator().manual_seed(0)
    values = 10 ** (-6 * torch.rand(9, width, generator=generator))
    if signed:
        values *= torch.randn(values.shape, generator=generator).sign()
    values[4] = 0
    values[5] *= 1e-30  # of another size than its neighbours
    codes, scale = quantized(values, signed=signed)
    assert codes.dtype == torch.uint8 and codes.shape == values.shape
    assert scale.shape == (9, -(-width // 256))
    found = dequantized(codes, scale, signed=signed)
    table = small_moments._table(signed)
    assert len(table.unique()) == 256
    for row in range(9):
        for at in range(0, width, 256):
            block = values[row, at : at + 256]
            choices = table * block.abs().max()
            nearest = (block.unsqueeze(1) - choices).abs().min(1).values
            error = (found[row, at : at + 256] - block).abs()
            torch.testing.assert_close(error, nearest, rtol=1e-3, atol=1e-7 * float(choices[-1]))


def test_the_values_are_those_of_the_paper() -> None:
    """As bitsandbytes has them: the ends, what is next to them, and the smallest."""
    signed, unsigned = small_moments._table(True), small_moments._table(False)
    ends = [float(signed[at]) for at in (0, -2, -1)]
    assert ends == pytest.approx([-0.99296875, 0.99296875, 1.0])
    assert float(signed[signed > 0].min()) == pytest.approx(5.5e-7)
    assert [float(unsigned[at]) for at in (0, 1, -2, -1)] == pytest.approx(
        [0.0, 3.25e-7, 0.996484375, 1.0]
    )
