"""What each position of packed rows attends to, as a dense mask or in blocks of flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # positions of a block of flex_attention, its default


@dataclass(frozen=True, slots=True, eq=False)
class RowMask:
    """R rows of L positions; a position sees what comes before it in its sequence.

    With a `window`, only so many tokens of it, itself included. Windows count positions of the
    sequence, so that they reach from a response into the prompt that it shares with others.
    """

    positions: Tensor  # int64 [R, L], from 0 in every sequence
    segment: Tensor | None = None  # int32 [R, L], -1 for padding; None: one sequence in each row
    prefix: Tensor | None = None  # int32 [R, L], segment of the prompt; its own if not shared
    window: int | None = None

    def within(self, window: int | None) -> RowMask:
        """The same with that window; None if it is wider than any row."""
        reach = window if window is None or window < self.positions.shape[1] else None
        return replace(self, window=reach)

    def allowed(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Bool [R, Q, L]: which of all positions the ones from `start` to `stop` attend to."""
        width = self.positions.shape[1]
        index = torch.arange(width, device=self.positions.device)
        some = slice(start, width if stop is None else stop)
        seen = index[None, None, :] <= index[None, some, None]
        if self.segment is not None and self.prefix is not None:
            keys = self.segment[:, None, :]
            # Padding attends within itself: a row of the mask without any True would give NaN.
            same = self.segment[:, some, None] == keys
            seen = seen & (same | (self.prefix[:, some, None] == keys))
        if self.window is not None:
            behind = self.positions[:, some, None] - self.positions[:, None, :]
            seen = seen & (behind < self.window)
        return seen.expand(len(self.positions), -1, -1)

    def blocks(self) -> BlockMask:
        """The mask of flex_attention, found without one of all pairs in memory."""
        rows, width = self.positions.shape
        across = -(-width // BLOCK)
        some: list[Tensor] = []
        every: list[Tensor] = []
        for start in range(0, width, BLOCK):
            seen = self.allowed(start, min(width, start + BLOCK))
            seen = torch.nn.functional.pad(seen, (0, across * BLOCK - width))
            cells = seen.view(rows, -1, across, BLOCK)
            some.append(cells.any(3).any(1))
            # A block at the edge is not full, though all of it that exists is seen.
            full = cells.all(3).all(1)
            every.append(full if start + BLOCK <= width else torch.zeros_like(full))
        seen_some, seen_all = torch.stack(some, 1), torch.stack(every, 1)  # [R, blocks, blocks]
        partial, whole = _listed(seen_some & ~seen_all), _listed(seen_all)
        return BlockMask.from_kv_blocks(
            *partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=self._rule(), seq_lengths=(width, width)
        )

    def _rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """`mask_mod` of flex_attention: `allowed` of a single pair."""
        positions, segment, prefix, window = (
            self.positions,
            self.segment,
            self.prefix,
            self.window,
        )

        def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = key <= query
            if segment is not None and prefix is not None:
                own = segment[row, key]
                seen = seen & ((segment[row, query] == own) | (prefix[row, query] == own))
            if window is not None:
                seen = seen & (positions[row, query] - positions[row, key] < window)
            return seen

        return rule


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks [R, Q, K]: how many each row of blocks has, [R, 1, Q], and which, [R, 1, Q, K]."""
    order = seen.int().argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()
