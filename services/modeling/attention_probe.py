"""Checks that flex_attention is right on this GPU, and that sequences don't see neighbours.

flex_attention is compared with a dense mask before its use. This compiles the kernels of the
model's layers for a row, of passes with gradients and without: the first step, which has a
deadline, seldom compiles another.

What needs a GPU can't be tested without one, and a kernel that is right on one GPU with one version
of torch may not be on another. Nobody would notice a wrong gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from umbra.services.modeling.architectures import head_widths
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.micro_batch import MicroBatch, RowMask, Tokens
from umbra.services.modeling.packing import pack

WITHIN = 0.02  # of the norm: bfloat16 is 0.003 to 0.01 off, a wrong mask 0.1 and more
WINDOW = 40  # at most, so that it ends within the rows
INPUTS = ("queries", "keys", "values", "sinks")
PROMPTS, RESPONSES = (70, 70, 30), (150, 90, 111)  # several blocks of flex_attention, and edges


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model that an attention kernel depends on."""

    heads: int
    groups: int
    width: int  # of queries and keys
    values: int  # of values
    cap: float | None = None
    sinks: bool = False
    scale: float | None = None

    @classmethod
    def of(cls, config: Any, *, sinks: bool, scale: float | None = None) -> Shape:
        known = config.get_text_config()
        heads = known.num_attention_heads
        groups = getattr(known, "num_key_value_heads", None) or heads
        cap = getattr(known, "attn_logit_softcapping", None)
        return cls(heads, groups, *head_widths(known), cap, sinks, scale)


@functools.cache
def fault(shape: Shape, window: int | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the fault of flex_attention there, or None."""
    try:
        errors = differences(shape, window, device, dtype)
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a kernel raises
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for name, error in errors.items():
        if not error < WITHIN:  # NaN is none
            return f"its {name} differ by {error:.2g} from a dense mask's"
    return None


def differences(
    shape: Shape, window: int | None, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the norms of differences to a dense mask in float64, over the norm of the latter.

    Of outputs and gradients, over rows in which two samples share a prompt and others stand beside.
    """
    micro = _rows().to(device)
    mask = micro.mask.within(None if window is None else min(window, WINDOW))
    assert micro.fed is not None
    seen = micro.fed.view(mask.positions.shape)
    of = _inputs(shape, mask, device, dtype)
    exact = _pass(shape, [t.double() for t in of], mask.allowed().unsqueeze(1), seen)
    found = _pass(shape, of, mask.blocks(), seen)
    with torch.no_grad():
        attend(of[0], of[1], of[2], mask.blocks(), **_how(shape, of))
    names = ["outputs", *(f"gradients of {name}" for name in INPUTS)]
    return {
        name: float((ours.double() - theirs).norm() / theirs.norm())
        for name, ours, theirs in zip(names, found, exact, strict=False)
    }


def neighbours(vocabulary: int, *, alone: bool) -> Iterator[MicroBatch]:
    """Yield two micro-batches that are to give the same logprobs, and do so to the bit.

    They differ in padding and in the sequence that stands before the one that is learned. With
    `alone` each has a row.
    """
    drawn = torch.Generator().manual_seed(0)
    own, *others = (torch.randint(vocabulary, (n,), generator=drawn) for n in (12, 16, 16))
    owner = torch.ones(8, dtype=torch.int64)
    for other in others:
        ids, lengths = torch.cat([other, own]), torch.tensor([16, 12])
        tokens = Tokens(ids, lengths, learned=torch.arange(20, 28), owner=owner)
        (micro,) = pack(tokens, pack_tokens=1 if alone else 64, micro_tokens=64)
        assert micro.fed is not None
        fed = micro.fed.view_as(micro.input_ids)
        yield replace(micro, input_ids=micro.input_ids.where(fed, other[0]))


def _rows() -> MicroBatch:
    lengths = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    total = int(lengths.sum())
    tokens = Tokens(
        torch.zeros(total, dtype=torch.int64),
        lengths,
        learned=lengths.cumsum(0) - 1,
        owner=torch.arange(len(lengths)),
        prompts=torch.tensor(PROMPTS),
        family=torch.tensor([0, 0, 1]),
    )
    (micro,) = pack(tokens, pack_tokens=total, micro_tokens=total, share_prompts=True)
    return micro


def _inputs(shape: Shape, mask: RowMask, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    rows, length = mask.positions.shape
    drawn = torch.Generator().manual_seed(0)
    sizes = [(shape.heads, shape.width), (shape.groups, shape.width), (shape.groups, shape.values)]
    made = [torch.randn(rows, heads, length, wide, generator=drawn) for heads, wide in sizes]
    if shape.sinks:
        made.append(torch.linspace(-1, 2, shape.heads))
    return [t.to(device, dtype) for t in made]


def _how(shape: Shape, of: list[Tensor]) -> dict[str, Any]:
    return {"scale": shape.scale, "cap": shape.cap, "sinks": of[3] if shape.sinks else None}


def _pass(shape: Shape, of: list[Tensor], mask: Any, seen: Tensor) -> list[Tensor]:
    """Return outputs at positions `seen`, bool [R, L], and gradients of their weighted sum."""
    own = [t.detach().requires_grad_() for t in of]
    found = attend(own[0], own[1], own[2], mask, **_how(shape, own)).transpose(1, 2)[seen]
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64, device=found.device)
    (found * weights.view_as(found).to(found.dtype)).sum().backward()
    grads = [t.grad for t in own if t.grad is not None]
    if len(grads) < len(own):
        raise RuntimeError("a gradient is missing")
    return [found.detach(), *grads]
