"""Which earlier positions each layer of a model attends to, and by which backend that is right.

Packed rows (`Scorer`, the value model) have `sdpa`, anywhere, with a mask of all pairs of a row, or
`flex`, on GPUs, with memory linear in the row. flex_attention is compared with a dense mask before
its use: a kernel that is right on one GPU with one version of torch may not be on another, and
nobody would notice a wrong gradient. This compiles the kernels of the model's layers, so that the
first step, which has a deadline, seldom compiles another.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.architectures import head_widths, keeps_state, layer_kinds
from umbra.services.modeling.attention_backends import NAME, attend
from umbra.services.modeling.micro_batch import MicroBatch, RowMask, Tokens
from umbra.services.modeling.packing import pack

log = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"  # Transformers' names of kinds of layers
_BESIDE_STATES = (FULL, "linear_attention", "conv", "hybrid", "moe", "mlp")
SLOW = (
    "flex_attention is not used on this GPU: %s. Packed rows take a mask of all pairs, several "
    "times slower and with memory by the square of trainer.pack_tokens: install a torch whose "
    "flex_attention works here, or lower trainer.pack_tokens and trainer.micro_tokens"
)
WITHIN = 0.02  # of the norm: bfloat16 is 0.003 to 0.01 off, a wrong mask 0.1 and more
WINDOW = 40  # at most, so that it ends within the rows
INPUTS = ("queries", "keys", "values", "sinks")
PROMPTS, RESPONSES = (70, 70, 30), (150, 90, 111)  # several blocks of flex_attention, and edges
RowMasks = Tensor | BlockMask | dict[str, Any]
Choice = Literal["auto", "sdpa", "flex"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The windows of a model's layers, and the backend of packed rows."""

    windows: tuple[tuple[str, int | None], ...] = ((FULL, None),)
    """By kind of attention, how many tokens a position sees, itself included; None: all."""
    backend: Choice = "sdpa"  # of packed rows; auto: flex_attention, which is right on this GPU
    plain: bool = True  # scores have no soft cap, and there are no sinks
    recurrent: bool = False  # layers carry a state from token to token: a row has one sequence

    @classmethod
    def prepare(cls, model: PreTrainedModel, device: torch.device) -> Attention:
        """Have `model`, which computes on `device`, attend by our backends, for rows of `express`.

        Raises UsageError for a kind of layer that is none of ours.
        """
        attention = cls.of(model.config)
        if device.type == "cuda" and not attention.recurrent:  # of these, rows need no mask
            scales = (getattr(module, "scaling", None) for module in model.modules())
            scale = next((scaling for scaling in scales if isinstance(scaling, float)), None)
            sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
            shape = KernelShape.of(model.config, sinks=sinks, scale=scale)
            faults = (flex_fault(shape, w, device, torch.bfloat16) for _, w in attention.windows)
            if fault := next(filter(None, faults), None):
                log.error(SLOW, fault)
            else:
                attention = replace(
                    attention, backend="auto", plain=shape.cap is None and not sinks
                )
        model.set_attn_implementation(NAME)
        return attention

    @classmethod
    def of(cls, config: Any) -> Attention:
        """Return the windows of a loaded model's Transformers config; errors as of `prepare`.

        Classes that have `layer_types` take one mask for each kind of layer; others have one
        window, `sliding_window`, for all layers.
        """
        window: int | None = getattr(config, "sliding_window", None)
        recurrent = keeps_state(config)
        sizes: dict[str, int | None] = {FULL: None, SLIDING: window}
        if recurrent:
            sizes = dict.fromkeys(_BESIDE_STATES)
        kinds = sorted(set(layer_kinds(config) or [SLIDING if window else FULL]))
        strange = [kind for kind in kinds if kind not in sizes]
        if strange:
            raise UsageError(f"{config.model_type} has layers of type {', '.join(strange)}")
        if recurrent:
            return cls(((FULL, None),) if {FULL, "hybrid"} & {*kinds} else (), recurrent=True)
        return cls(tuple((kind, sizes[kind]) for kind in kinds))

    def express(self, rows: RowMask) -> RowMasks | None:
        """Return the `attention_mask` of packed rows, by kind of layer; None: causal is exact."""
        if self.recurrent:
            assert rows.segment is None, "a row of such a model has one sequence"
            return None
        backend = self.backend
        if backend == "auto":
            # Causal SDPA needs no mask: its fast kernel runs.
            width = rows.positions.shape[1]
            windows = any(window is not None and window < width for _, window in self.windows)
            backend = "sdpa" if rows.segment is None and self.plain and not windows else "flex"
        if backend == "sdpa" and rows.segment is None:
            return None
        masks: dict[str, Any] = {}
        for kind, window in self.windows:
            reach = rows.within(window)
            masks[kind] = reach.blocks() if backend == "flex" else reach.allowed().unsqueeze(1)
        return masks if len(masks) > 1 else masks.popitem()[1]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The dimensions of a model that an attention kernel depends on."""

    heads: int
    groups: int
    width: int  # of queries and keys
    values: int  # of values
    cap: float | None = None
    sinks: bool = False
    scale: float | None = None

    @classmethod
    def of(cls, config: Any, *, sinks: bool, scale: float | None = None) -> KernelShape:
        known = config.get_text_config()
        groups = getattr(known, "num_key_value_heads", None) or known.num_attention_heads
        cap = getattr(known, "attn_logit_softcapping", None)
        return cls(known.num_attention_heads, groups, *head_widths(known), cap, sinks, scale)


@functools.cache
def flex_fault(
    shape: KernelShape, window: int | None, device: torch.device, dtype: torch.dtype
) -> str | None:
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
    shape: KernelShape, window: int | None, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return relative norms of differences to a dense mask in float64, of outputs and gradients.

    Over rows in which two samples share a prompt and others stand beside.
    """
    micro = _rows().to(device)
    mask = micro.mask.within(None if window is None else min(window, WINDOW))
    rows, length = mask.positions.shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(shape.heads, shape.width), (shape.groups, shape.width), (shape.groups, shape.values)]
    inputs = [torch.randn(rows, heads, length, wide, generator=generator) for heads, wide in sizes]
    inputs += [torch.linspace(-1, 2, shape.heads)] if shape.sinks else []
    inputs = [t.to(device, dtype) for t in inputs]
    exact = _pass(shape, [t.double() for t in inputs], mask.allowed().unsqueeze(1), micro.fed)
    values = _pass(shape, inputs, mask.blocks(), micro.fed)
    with torch.no_grad():
        _attend(shape, inputs, mask.blocks())
    names = ["outputs", *(f"gradients of {name}" for name in INPUTS)]
    return {
        name: float((value.double() - reference).norm() / reference.norm())
        for name, value, reference in zip(names, values, exact, strict=False)
    }


def neighbours(vocabulary: int, *, alone: bool) -> Iterator[MicroBatch]:
    """Yield two micro-batches that are to give the same logprobs, and do so to the bit.

    They differ in padding and in the sequence before the learned one; with `alone` each has a row.
    """
    generator = torch.Generator().manual_seed(0)
    sequence, *others = (torch.randint(vocabulary, (n,), generator=generator) for n in (12, 16, 16))
    owner = torch.ones(8, dtype=torch.int64)
    for neighbour in others:
        ids, lengths = torch.cat([neighbour, sequence]), torch.tensor([16, 12])
        tokens = Tokens(ids, lengths, learned=torch.arange(20, 28), owner=owner)
        (micro,) = pack(tokens, pack_tokens=1 if alone else 64, micro_tokens=64)
        yield replace(micro, input_ids=micro.input_ids.where(micro.fed, neighbour[0]))


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


def _attend(shape: KernelShape, inputs: list[Tensor], mask: Any) -> Tensor:
    query, key, value, *sinks = inputs
    how = {"scale": shape.scale, "cap": shape.cap, "sinks": sinks[0] if sinks else None}
    return attend(query, key, value, mask, **how)


def _pass(shape: KernelShape, inputs: list[Tensor], mask: Any, shown: Tensor) -> list[Tensor]:
    """Return outputs at positions `shown`, bool [R, L], and gradients of their weighted sum."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = _attend(shape, leaves, mask).transpose(1, 2)[shown]
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64, device=outputs.device)
    (outputs * weights.view_as(outputs).to(outputs.dtype)).sum().backward()
    grads = [t.grad for t in leaves if t.grad is not None]
    if len(grads) < len(leaves):
        raise RuntimeError("a gradient is missing")
    return [outputs.detach(), *grads]
