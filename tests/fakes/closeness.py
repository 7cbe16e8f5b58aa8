"""How far two results may be apart that are the same sums in another order.

A rounding is off by u = eps/2 of a partial sum at most. The errors of n of them are independent,
and stay below lambda sqrt(n) u with a probability of 1 - 2 exp(-lambda^2 / 2) (Higham and Mary,
"A new approach to probabilistic rounding error analysis", 2019, theorem 2.4). Two results that are
compared are each off by that, relative to the numbers that were added up.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

_LAMBDA = 5.0  # 7 of a million numbers may be further off


def rounding(terms: int) -> float:
    """The bound for sums of `terms` numbers, relative to the size of the terms."""
    return _LAMBDA * torch.finfo(torch.float32).eps * math.sqrt(terms)


def model_terms(config: Any, *, backward: bool = False) -> int:
    """The longest chain of additions from a model's input to its logprobs, or to a gradient."""
    width = max(config.hidden_size, getattr(config, "intermediate_size", 0))
    return (2 if backward else 1) * config.num_hidden_layers * width + config.vocab_size


def assert_same_sums(found: Tensor, expected: Tensor, *, terms: int, what: str = "") -> None:
    """All of `found` is `expected` up to rounding.

    The terms are as large as the largest number of `expected`: the elements of a tensor are sums of
    like things, some of which cancel out.

    Args:
        found: a result.
        expected: the same with its sums in another order.
        terms: how many numbers are added up, one after the other, for one of them.
        what: names the tensors in the error.
    """
    assert found.shape == expected.shape, what
    if not len(expected.flatten()):
        return
    off = float((found.double() - expected.double()).abs().max())
    bound = float(expected.abs().max()) * rounding(terms)
    assert off <= bound, f"{what}: off by {off:.3g}, where rounding explains {bound:.3g}"


def assert_same_logprobs(found: Tensor, expected: Tensor, model: Any) -> None:
    """Logprobs [T] of `model` equal another way through it, up to rounding."""
    assert_same_sums(found, expected, terms=model_terms(model.config), what="logprobs")


def same_sum(expected: float, *, terms: int, scale: float = 0.0) -> Any:
    """A number to compare with: `expected` up to rounding of terms of size `scale`, if larger."""
    return pytest.approx(expected, rel=0, abs=max(abs(expected), scale) * rounding(terms))
