"""Attention of a pass of the torch engine: newest tokens of many rows, and whole contexts, at once.

The queries of a pass lie end to end: one of each of n rows, which sees what the cache holds of its
row up to its own position, and then those of contexts, which see causally what was just written of
them. So prompts are read in the very pass in which running sequences get their next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Context(NamedTuple):
    """A sequence that is read from its beginning."""

    row: int  # of the cache, where it is found
    length: int


class Attend(Protocol):
    """Attention with a dense mask, as `attention_backends.attend`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class SlotMask:
    """What the tokens of such a pass attend to."""

    newest: Tensor
    """What is added to the scores of the first tokens, [n, 1, 1, L]: 0 or -inf."""
    contexts: Sequence[Context]
    window: int | None = None

    @property
    def ndim(self) -> int:
        """Four, as of a mask [1, 1, T, L]: Transformers looks, and hands such a one on as it is."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As of such a mask."""
        tokens = len(self.newest) + sum(context.length for context in self.contexts)
        return 1, 1, tokens, self.newest.shape[-1]


def slot_mask(
    positions: Tensor,
    columns: int,
    contexts: Sequence[Context],
    window: int | None,
    dtype: torch.dtype,
) -> SlotMask:
    """The mask for newest tokens at `positions` [n], among `columns` of the cache, and contexts."""
    held = torch.arange(columns, device=positions.device)
    hidden = held > positions[:, None]
    if window is not None:
        hidden |= held <= positions[:, None] - window
    newest = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return SlotMask(newest.masked_fill_(hidden, -torch.inf)[:, None, None], contexts, window)


def slot_attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SlotMask,
    *,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(scores) value, [1, H, T, E].

    Args:
        attend: for each part.
        query: [1, H, T, D].
        key: what the cache holds, [n, G, L, D].
        value: [n, G, L, E].
        mask: of all parts.
        scale: as of `attend`, and so are `cap` and `sinks`.
    """
    count, groups = len(mask.newest), key.shape[1]
    parts: list[Tensor] = []
    if count:
        newest = query[0, :, :count].transpose(0, 1)  # [n, H, D]
        if cap is None and sinks is None:
            # Query heads that share a key head stand where its queries would: no key is copied.
            newest = newest.unflatten(1, (groups, -1))
            found = torch.nn.functional.scaled_dot_product_attention(
                newest, key, value, attn_mask=mask.newest, scale=scale
            ).flatten(1, 2)
        else:
            found = attend(
                newest[:, :, None], key, value, mask.newest, scale=scale, cap=cap, sinks=sinks
            ).squeeze(2)
        parts.append(found.transpose(0, 1)[None])
    start = count
    for context in mask.contexts:
        length, own = context.length, slice(context.row, context.row + 1)
        parts.append(
            attend(
                query[:, :, start : start + context.length],
                key[own, :, :length],
                value[own, :, :length],
                _causal(context, mask.window, query.device),
                scale=scale,
                cap=cap,
                sinks=sinks,
            )
        )
        start += context.length
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _causal(context: Context, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of a context, [1, 1, length, length]; None: a causal one without window."""
    if window is None or context.length <= window:
        return None
    ones = torch.ones(context.length, context.length, dtype=torch.bool, device=device)
    seen = ones.tril() & ~ones.tril(-window)
    return seen[None, None]
