"""Backends of attention that need a GPU compute what a dense mask gives, and so do gradients."""

from typing import Any

import pytest
import torch
from fakes.packed_rows import LAYOUTS, fed, gradients, inputs, rows_of
from torch import Tensor

from umbra.services.modeling.attention_backends import attend

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def both(
    layout: str, window: int | None, dtype: torch.dtype, cap: float | None, sinks: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs at fed positions and gradients: of a dense mask in float64, and of a backend."""
    micro = rows_of(layout).to(CUDA)
    of = inputs(micro, 4, 2, 64, 64)
    if sinks:
        of.append(torch.linspace(-1, 2, 4, dtype=torch.float64))
    mask, seen = micro.mask.within(window), fed(micro).to(CUDA)
    results: list[list[Tensor]] = []
    for kind, given in (
        (torch.float64, mask.allowed().unsqueeze(1)),
        (dtype, mask.blocks()),
    ):
        own = [t.detach().to(CUDA, kind).requires_grad_() for t in of]
        how: Any = {"scale": 0.3, "cap": cap, "sinks": own[3] if sinks else None}
        found = attend(own[0], own[1], own[2], given, **how)
        results.append([found.transpose(1, 2)[seen], *gradients(found, own, seen)])
    return results[0], results[1]


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (2.0, False), (None, True)])
def test_flex(layout: str, window: int | None, cap: float | None, sinks: bool) -> None:
    dense, found = both(layout, window, torch.float32, cap, sinks)
    for ours, theirs in zip(found, dense, strict=True):
        # Products of a GPU's float32 may be in TF32, with 10 bits.
        torch.testing.assert_close(ours.double(), theirs, atol=2e-2, rtol=2e-2)
