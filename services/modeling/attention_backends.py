"""Attention by two backends, which Transformers calls as one.

The mask's type says which: a tensor or None: SDPA with a dense mask, or all scores at once where
there are soft caps or sinks; `RowBlocks`: flex_attention; `SlotMask`: the torch engine's cache.

The queries of a pass of that engine lie end to end: one of each of n rows, which sees its row in
the cache up to its own position, and then the queries of contexts, which attend causally to the
keys just written for them. So prompts are read while running sequences get their next token.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from umbra.services.modeling.micro_batch import RowBlocks


class Context(NamedTuple):
    """A sequence that is read from its beginning."""

    row: int  # of the cache, where it is found
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class SlotMask:
    """The mask of such a pass."""

    newest: Tensor  # added to the scores of the first tokens, [n, 1, 1, L]: 0 or -inf
    contexts: Sequence[Context]
    window: int | None = None
    ndim: ClassVar[int] = 4  # as of a mask [1, 1, T, L]: Transformers hands such a one on as it is

    @property
    def shape(self) -> tuple[int, int, int, int]:
        tokens = len(self.newest) + sum(context.length for context in self.contexts)
        return 1, 1, tokens, self.newest.shape[-1]


def slot_mask(
    positions: Tensor,
    columns: int,
    contexts: Sequence[Context],
    window: int | None,
    dtype: torch.dtype,
) -> SlotMask:
    """Return the mask of newest tokens at `positions` [n] of `columns`, and of contexts."""
    column = torch.arange(columns, device=positions.device)
    hidden = column > positions[:, None]
    if window is not None:
        hidden |= column <= positions[:, None] - window
    newest = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return SlotMask(newest.masked_fill_(hidden, -torch.inf)[:, None, None], contexts, window)


NAME = "umbra"  # of our attention in Transformers
LayerMask = Tensor | RowBlocks | SlotMask | None


class Scores(NamedTuple):
    """The parameters of attention scores; arguments as of `attend`."""

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.cap is None and self.sinks is None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LayerMask,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scores) value, [R, H, L, E].

    Args:
        query: [R, H, L, D].
        key: [R, G, L, D]; H is a multiple of G.
        value: [R, G, L, E].
        mask: bool or added to scores, [R, 1, L, L], None for a causal one, or another backend's.
        scale: of scores; None: 1 / sqrt(D).
        cap: scores become cap * tanh(score / cap) before they are masked (Gemma 2).
        sinks: [H], scores of one more key for each head, which has no value (GPT-OSS).
    """
    how = Scores(query.shape[-1] ** -0.5 if scale is None else scale, cap, sinks)
    if isinstance(mask, RowBlocks):
        return _flex(query, key, value, mask, how)
    if isinstance(mask, SlotMask):
        return _slots(query, key, value, mask, how)
    return _dense(query, key, value, mask, how)


def _slots(query: Tensor, key: Tensor, value: Tensor, mask: SlotMask, how: Scores) -> Tensor:
    """Attend to the cache: key [n, G, L, D] and value, for queries [1, H, T, D]."""
    count = len(mask.newest)
    parts: list[Tensor] = []
    if count:
        newest = query[0, :, :count].transpose(0, 1)  # [n, H, D]
        if how.plain:
            # Query heads that share a key head stand where its queries would: no key is copied.
            newest = newest.unflatten(1, (key.shape[1], -1))
            output = scaled_dot_product_attention(
                newest, key, value, attn_mask=mask.newest, scale=how.scale
            ).flatten(1, 2)
        else:
            output = _dense(newest[:, :, None], key, value, mask.newest, how).squeeze(2)
        parts.append(output.transpose(0, 1)[None])
    for context in mask.contexts:
        length, row = context.length, slice(context.row, context.row + 1)
        causal = None
        if mask.window is not None and length > mask.window:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            causal = (ones.tril() & ~ones.tril(-mask.window))[None, None]
        queries = query[:, :, count : count + length]
        parts.append(_dense(queries, key[row, :, :length], value[row, :, :length], causal, how))
        count += length
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Scores) -> Tensor:
    """Attend by SDPA; with soft caps or sinks by all scores at once."""
    groups = query.shape[1] // key.shape[1]
    # With a mask or wide heads, GPUs have no kernel for fewer keys' heads but the slow one.
    grouped = how.plain and groups > 1 and mask is None
    grouped = grouped and key.shape[-1] == value.shape[-1] <= 256
    if groups > 1 and not grouped:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if how.plain:
        causal = query.shape[2] > 1 and mask is None  # else traced shapes make a symbol
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=how.scale, enable_gqa=grouped
        )
    scores = query @ key.transpose(-1, -2) * how.scale
    if how.cap is not None:
        scores = torch.tanh(scores / how.cap) * how.cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    hides = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -torch.inf) if hides else scores + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if how.sinks is not None:
        sink_scores = how.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: RowBlocks, how: Scores) -> Tensor:
    """Attend by torch's flex_attention; on CPUs, where it is for tests, by all scores at once."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    length, width = query.shape[2], mask.seq_lengths[0]
    if length < width:  # `RowMask.blocks` has widened narrow rows; in memory as models lay it out
        padding = (0, 0, 0, 0, 0, width - length)
        query, key, value = (
            pad(tensor.transpose(1, 2), padding).transpose(1, 2) for tensor in (query, key, value)
        )
    kernel = _flex_on(query.device.type)
    output, sums = kernel(query, key, value, mask, how.scale, how.cap, how.sinks is not None)
    if how.sinks is not None:
        # The sums of exponentials stay in float32: their rounding would scale the output.
        sinks = how.sinks.float().view(1, -1, 1)
        output = output * torch.sigmoid(sums - sinks).unsqueeze(-1).to(output.dtype)
    return output[:, :, :length]


_OF_BLOCKS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "mask_mod"),
)


def _flex_on(kind: str) -> Callable[..., tuple[Tensor, Any]]:
    return _flex_eagerly if kind == "cpu" else _flex_kernel


def _flex_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowBlocks,
    scale: float,
    cap: float | None,
    sums: bool,
) -> tuple[Tensor, Any]:
    """Return softmax(scores) value, and with `sums` the logs of the sums of exponentials."""
    # The mask's own lengths are numbers, each of which would be compiled for.
    length = query.shape[2]
    same: dict[str, Any] = {name: getattr(mask, name) for name in _OF_BLOCKS}
    blocks = BlockMask(seq_lengths=(length, length), **same)
    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=None if cap is None else _capped(cap),
        block_mask=blocks,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=sums),
    )
    return output, aux.lse


def _flex_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: RowBlocks, *how: Any
) -> tuple[Tensor, Any]:
    """Compute `_flex_eagerly` by the kernel of its kind.

    A kind is compiled for one row and for several: numbers of rows, of tokens and of blocks are
    dynamic from the beginning. Dynamo gives all sizes that are equal in the first batch one symbol,
    so that as many rows as blocks are a kind of their own.
    """
    rows, across = query.shape[0], mask.kv_indices.shape[-1]
    kind = (
        torch.is_grad_enabled(),
        *(tensor.requires_grad for tensor in (query, key, value)),
        *(query.device, query.dtype, query.shape[1], query.shape[3]),
        *(key.shape[1], value.shape[3]),
        *(*how, mask.windowed, rows == across),
    )
    for tensor in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(tensor, (0, 2))
    with torch.autocast(query.device.type, enabled=False):  # which has done its work
        return _compiled(kind)(query, key, value, mask, *how)


@functools.cache
def _compiled(kind: tuple[Any, ...]) -> Any:
    """Compile flex_attention for `kind`, apart from all others.

    Dynamo counts compilations by code object, and remembers by its name which numbers have varied.
    Past the limit it would compute all scores without a word; with `fullgraph` it raises.
    """
    code = _flex_eagerly.__code__.replace(co_name=f"flex_{abs(hash(kind)):x}")
    function = types.FunctionType(code, globals())
    return torch.compile(function, fullgraph=True)


@functools.cache
def _capped(cap: float) -> Any:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _from_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Call `attend` with the arguments of Transformers' models."""
    del module
    assert not dropout, "policies have no dropout"
    output = attend(query, key, value, attention_mask, scale=scaling, cap=softcap, sinks=s_aux)
    return output.transpose(1, 2).contiguous(), None


def _mask_of(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Return our masks as they are, or else the mask that SDPA would have."""
    if isinstance(attention_mask, RowBlocks | SlotMask):
        return attention_mask
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, _from_transformers)
AttentionMaskInterface.register(NAME, _mask_of)
