"""Attention over packed rows, segment by segment: no mask or score of all pairs is ever in memory.

As FlashAttention does it (Dao et al. 2022, arXiv 2205.14135): the forward pass keeps the logarithm
of each query's sum of exponentials, and the backward pass computes scores again from it. What is
kept is linear in the length of a row, and what is under way at a time is one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from umbra.services.modeling.row_mask import RowMask, Tile

SCORES = 16 << 20  # bytes of float32 scores that a tile may have


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend`, exact, on any device; padding gets zeros."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    fused = query.device.type == "cpu" and cap is None
    narrow = value.shape[-1]
    if fused and narrow < query.shape[-1]:  # the kernel wants one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - narrow))
    # The kernel wants widths without gaps.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    plan = _Plan(mask, scale, cap, fused and value.shape[-1] == query.shape[-1])
    return _Segments.apply(query, key, value, sinks, plan)[..., :narrow]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _Plan:
    mask: RowMask
    scale: float
    cap: float | None
    fused: bool  # by torch's kernel for CPUs

    def tiles(self, query: Tensor) -> list[Tile]:
        if self.fused:
            return list(self.mask.tiles(0))
        heads, width = query.shape[1:3]
        return list(self.mask.tiles(max(16, SCORES // (4 * heads * width))))


class _Segments(torch.autograd.Function):
    """Query heads are grouped by the key head that they share: [G, H / G, positions, width]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: _Plan
    ) -> Tensor:
        groups = key.shape[1]
        output = query.new_zeros(*query.shape[:3], value.shape[-1])
        sums: list[Tensor] = []
        sink = None if sinks is None else _wide(sinks.detach()).view(groups, -1, 1)
        with torch.autocast(query.device.type, enabled=False):
            for tile in plan.tiles(query):
                q, k, v = _cut(tile, query, key, value)
                found, total = _forward(tile, q, k, v, plan)
                if sink is not None:
                    # A sink is one more key, which is attended to and has no value.
                    whole = torch.logaddexp(total, sink)
                    found = found * (total - whole).exp().unsqueeze(-1).to(found.dtype)
                    total = whole
                output[tile.piece.row, :, tile.queries] = found.flatten(0, 1)
                sums.append(total)
        ctx.save_for_backward(query, key, value, sinks, output, *sums)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> Any:
        query, key, value, sinks, output, *sums = ctx.saved_tensors
        plan: _Plan = ctx.plan
        gradient = gradient.contiguous()  # of a sum it is a single number, spread
        groups = key.shape[1]
        d_query = torch.zeros_like(query)
        # Sums of the gradients of many queries, which 16 bits are too few for.
        d_key, d_value = torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
        d_sinks = None if sinks is None else torch.zeros_like(_wide(sinks))
        with torch.autocast(query.device.type, enabled=False):
            for tile, total in zip(plan.tiles(query), sums, strict=True):
                row, here = tile.piece.row, tile.queries
                q, k, v = _cut(tile, query, key, value)
                out = output[row, :, here].unflatten(0, (groups, -1))
                grad = gradient[row, :, here].unflatten(0, (groups, -1))
                dq, dk, dv = _backward(tile, (q, k, v), (out, total, grad), plan)
                d_query[row, :, here] = dq.flatten(0, 1)
                at = 0
                for cells in tile.keys:
                    size = cells.stop - cells.start
                    d_key[row, :, cells] += dk[:, at : at + size]
                    d_value[row, :, cells] += dv[:, at : at + size]
                    at += size
                if sinks is not None and d_sinks is not None:
                    share = (_wide(sinks).view(groups, -1, 1) - total).exp()
                    d_sinks -= (share * (_wide(grad) * out).sum(-1)).sum(-1).flatten()
        return (
            d_query,
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            None if d_sinks is None or sinks is None else d_sinks.to(sinks.dtype),
            None,
        )


def _wide(tensor: Tensor) -> Tensor:
    """In float32, if it is in less."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _cut(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [G, H / G, Q, D] and keys and values [G, K, D] of a tile."""
    row, groups = tile.piece.row, key.shape[1]
    parts = [[t[row, :, cells] for cells in tile.keys] for t in (key, value)]
    k, v = (torch.cat(part, -2) if len(part) > 1 else part[0] for part in parts)
    return query[row, :, tile.queries].unflatten(0, (groups, -1)), k, v


def _forward(tile: Tile, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Output [G, H / G, Q, E], and the log of each query's sum of exponentials, [G, H / G, Q]."""
    if plan.fused:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, *_spread(q, k, v), is_causal=tile.square, attn_mask=_added(tile, q), scale=plan.scale
        )
    scores = _scores(tile, q, k, plan)
    total = scores.logsumexp(-1)
    weights = (scores - total.unsqueeze(-1)).exp_().to(v.dtype)
    return weights @ v.unsqueeze(1), total


def _backward(
    tile: Tile,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    plan: _Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [G, H / G, Q, D], keys [G, K, D] and values [G, K, E] of a tile."""
    (q, k, v), (out, total, grad) = inputs, results
    if plan.fused:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, *_spread(q, k, v), out, total, 0.0, tile.square,
            attn_mask=_added(tile, q), scale=plan.scale,
        )  # fmt: skip
        return dq, dk.sum(1), dv.sum(1)
    scores = _scores(tile, q, k, plan)
    weights = (scores - total.unsqueeze(-1)).exp()
    d_weights = (grad @ v.unsqueeze(1).transpose(-1, -2)).to(weights.dtype)
    delta = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - delta)
    if plan.cap is not None:
        d_scores = d_scores * (1 - (scores / plan.cap).nan_to_num(neginf=0.0).square())
    d_scores = (d_scores * plan.scale).to(q.dtype)
    dq = d_scores @ k.unsqueeze(1)
    dk = (d_scores.transpose(-1, -2) @ q).sum(1)
    return dq, dk, (weights.to(grad.dtype).transpose(-1, -2) @ grad).sum(1)


def _scores(tile: Tile, q: Tensor, k: Tensor, plan: _Plan) -> Tensor:
    """What the softmax is taken of, float32 or wider, [G, H / G, Q, K]."""
    scores = (q @ k.unsqueeze(1).transpose(-1, -2)) * plan.scale
    scores = _wide(scores)
    if plan.cap is not None:
        scores = torch.tanh(scores / plan.cap) * plan.cap
    return scores.masked_fill(~tile.allowed(q.device), -torch.inf)


def _spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as often as query heads share them, without a copy."""
    return tuple(t.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for t in (k, v))  # pyright: ignore[reportReturnType]


def _added(tile: Tile, q: Tensor) -> Tensor | None:
    """The mask of a tile, in the form that torch's kernel adds to scores."""
    if tile.square:
        return None
    seen = tile.allowed(q.device)
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
