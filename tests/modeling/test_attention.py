"""A backend that is wrong where it runs is found out before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.packed_rows import rows_of
from torch import Tensor

from umbra.services.modeling import attention as module
from umbra.services.modeling.attention import Attention, KernelShape, differences, flex_fault
from umbra.services.modeling.micro_batch import RowMask
from umbra.services.trainer.policy import load_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = ((4, 2, 16, 16), (2, 2, 24, 16))
SHAPES = [*(KernelShape(*each) for each in SIZES), KernelShape(4, 2, 16, 16, cap=2.0, sinks=True)]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    flex_fault.cache_clear()


@pytest.mark.parametrize("window", [None, 7, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_right_is_within_rounding(
    shape: KernelShape, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowMask, "blocks", dense)
    exact = differences(shape, window, CPU, torch.float64)
    assert len(exact) == (5 if shape.sinks else 4)
    assert max(exact.values()) < 1e-12
    assert flex_fault(shape, window, CPU, torch.bfloat16) is None


def dense(mask: RowMask) -> Any:
    """A dense mask in the place of blocks: flex_attention has no backward pass on CPUs."""
    found = mask.allowed().unsqueeze(1)
    found.other = True  # pyright: ignore[reportAttributeAccessIssue]
    return found


def wider(v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return v, mask | mask.roll(-1, -1).tril(-1)


def forgetful(v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return v.detach() + 0 * v, mask


def broken(v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("no kernel\nfor this")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (wider, "its outputs differ by"),
        (forgetful, "its gradients of values differ by"),
        (broken, "NotImplementedError: no kernel"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    told: str,
) -> None:
    attend = module.attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        v, mask = harm(v, mask) if hasattr(mask, "other") else (v, mask)
        return attend(q, k, v, mask, **how)

    monkeypatch.setattr(RowMask, "blocks", dense)
    monkeypatch.setattr(module, "attend", wrong)
    found = flex_fault(SHAPES[0], 7, CPU, torch.float32)
    assert found is not None and found.startswith(told)
    assert "\n" not in found


def test_a_gpu_on_which_flex_is_wrong_does_without(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_policy(tiny_model_dir)[0]
    asked: list[tuple[Any, ...]] = []

    def wrong(*what: Any) -> str | None:
        asked.append(what)
        return "it is off"

    monkeypatch.setattr(module, "flex_fault", wrong)
    attention = Attention.prepare(model, CUDA)
    assert asked[0][2:] == (CUDA, torch.bfloat16)
    config = model.config
    assert asked[0][0].width == config.head_dim
    assert asked[0][0].heads * config.num_key_value_heads == (
        asked[0][0].groups * config.num_attention_heads
    )
    assert not attention.flexes
    assert Attention.prepare(model, CPU).flexes and len(asked) == 1, "not on CPUs"


@pytest.mark.parametrize(("flexes", "backend"), [(True, "flex"), (False, "sdpa")])
def test_auto_on_a_gpu_takes_what_is_right(flexes: bool, backend: str) -> None:
    packed, alone = (rows_of(layout).mask for layout in ("packed", "one sequence in each row"))
    attention = Attention(backend="auto", flexes=flexes)

    def on_gpu(rows: Any) -> Any:
        return replace(rows, positions=SimpleNamespace(shape=rows.positions.shape, device=CUDA))

    assert attention._backend(on_gpu(packed)) == backend
    assert attention._backend(on_gpu(alone)) == "sdpa"
