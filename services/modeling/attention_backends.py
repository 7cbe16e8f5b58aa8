"""Attention by two backends, which Transformers calls as one.

The mask's type says which: a tensor or None: SDPA with a dense mask, or all scores at once where
there are soft caps or sinks; `BlockMask`: flex_attention; `SlotMask`: what the torch engine's cache
holds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from umbra.services.modeling.slot_attention import SlotMask, slot_attention

NAME = "umbra"  # of our attention in Transformers
LayerMask = Tensor | BlockMask | SlotMask | None


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
    """softmax(scores) value, [R, H, L, E].

    Args:
        query: [R, H, L, D].
        key: [R, G, L, D]; H is a multiple of G.
        value: [R, G, L, E].
        mask: bool or added to scores, [R, 1, L, L], None for a causal one, or another backend's.
        scale: of scores; None: 1 / sqrt(D).
        cap: scores become cap * tanh(score / cap) before they are masked (Gemma 2).
        sinks: [H], scores of one more key for each head, which has no value (GPT-OSS).
    """
    scale = float(query.shape[-1] ** -0.5) if scale is None else scale
    if isinstance(mask, BlockMask):
        return _flex(query, key, value, mask, scale, cap, sinks)
    if isinstance(mask, SlotMask):
        return slot_attention(attend, query, key, value, mask, scale=scale, cap=cap, sinks=sinks)
    if cap is None and sinks is None:
        groups = query.shape[1] // key.shape[1]
        # With a mask or wide heads, GPUs have no kernel for fewer keys' heads but the slow one.
        grouped = groups > 1 and mask is None and key.shape[-1] == value.shape[-1] <= 256
        if groups > 1 and not grouped:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=scale,
            enable_gqa=grouped,
        )
    return _plain(query, key, value, mask, scale, cap, sinks)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """All scores at once: what SDPA has no place for."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is not None:
        more = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, more], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """By torch's flex_attention, compiled once; on CPUs there is no backward pass."""
    if isinstance(query, FakeTensor):
        return _linear(query, key, value, scale)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output, aux = _flex_kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if cap is None else _capped(cap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # The sums of exponentials stay in float32: their rounding would scale the output.
        more = sinks.float().view(1, -1, 1)
        output = output * torch.sigmoid(aux.lse - more).unsqueeze(-1).to(output.dtype)
    return output


@functools.cache
def _flex_kernel(kind: str) -> Any:
    """For devices of that kind. On CPUs it is for tests: all scores are in memory there."""
    return torch.compile(flex_attention) if kind == "cuda" else flex_attention


@functools.cache
def _capped(cap: float) -> Any:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _linear(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Keep as many numbers as flex_attention does, for the estimate of memory."""
    wide, narrow = query.shape[-1], value.shape[-1]
    value = torch.nn.functional.pad(value, (0, wide - narrow))  # the kernel wants one width
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output[..., :narrow]


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
    """`attend` with the arguments and results that Transformers' models have."""
    del module
    assert not dropout, "policies have no dropout"
    found = attend(query, key, value, attention_mask, scale=scaling, cap=softcap, sinks=s_aux)
    return found.transpose(1, 2).contiguous(), None


def _mask_of(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """What a layer is given: our masks as they are, or the one that it would have with SDPA."""
    if isinstance(attention_mask, BlockMask | SlotMask):
        return attention_mask
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, _from_transformers)
AttentionMaskInterface.register(NAME, _mask_of)
