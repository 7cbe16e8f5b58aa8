"""What each position of packed rows attends to: one description, in the form each backend takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # positions of a block of flex_attention, its default


class RowSegment(NamedTuple):
    """Positions of a row that lie side by side: a sequence, a shared prompt, or what follows one.

    They attend to each other causally, and to all of the prompt that they share.
    """

    row: int
    start: int  # in the row
    size: int
    prompt: int = 0  # where the shared prompt starts in the row
    shared: int = 0  # tokens of it; 0: none


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Rows laid end to end, in which nothing is shared, as `varlen_attn` takes them."""

    rows: int
    width: int
    starts: Tensor  # int32 [N + 1], of each sequence and of what follows the last one
    longest: int
    window: int | None

    @property
    def ndim(self) -> int:
        """As of `RowMask`."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the dense mask."""
        return self.rows, 1, self.width, self.width


@dataclass(frozen=True, slots=True, eq=False)
class RowMask:
    """R rows of L positions; a position sees what comes before it in its sequence.

    With a `window`, only so many tokens of it, itself included. Windows count positions of the
    sequence, so that they reach from a response into the prompt that it shares with others.
    """

    positions: Tensor  # int64 [R, L], from 0 in every sequence
    pieces: tuple[RowSegment, ...]  # by row and start; without padding
    segment: Tensor | None = None  # int32 [R, L], -1 for padding; None: one sequence in each row
    prefix: Tensor | None = None  # int32 [R, L], segment of the prompt; its own if not shared
    window: int | None = None

    @property
    def ndim(self) -> int:
        """Four, as of a mask [R, 1, L, L]: Transformers looks, and hands such a one on as it is."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the dense mask."""
        rows, width = self.positions.shape
        return rows, 1, width, width

    @property
    def shares(self) -> bool:
        """Whether a prompt has several responses in a row."""
        return any(piece.shared for piece in self.pieces)

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

    def sequences(self) -> PackedSequences:
        """For `varlen_attn`; padding is a sequence of its own, which nobody looks at."""
        rows, width = self.positions.shape
        edges = {row * width for row in range(rows + 1)}
        for piece in self.pieces:
            edges |= {
                piece.row * width + piece.start,
                piece.row * width + piece.start + piece.size,
            }
        starts = sorted(edges)
        longest = max(b - a for a, b in pairwise(starts))
        tensor = torch.tensor(starts, dtype=torch.int32, device=self.positions.device)
        return PackedSequences(rows, width, tensor, longest, self.window)

    def tiles(self, most: int) -> Iterator[Tile]:
        """All queries that are no padding, in tiles of at most `most`; 0: as large as can be.

        A piece that sees all before it, and shares nothing, is a single tile with `most` = 0.
        """
        for piece in self.pieces:
            plain = not piece.shared and (self.window is None or piece.size <= self.window)
            step = piece.size if plain and not most else most or BLOCK * 4
            for start in range(0, piece.size, step):
                stop = min(piece.size, start + step)
                low = 0
                if self.window is not None:
                    low = max(0, piece.shared + start - self.window + 1)
                yield Tile(piece, start, stop, low, self.window)


class Tile(NamedTuple):
    """Queries `start` to `stop` of a piece, and the keys of its sequence from position `low` on."""

    piece: RowSegment
    start: int
    stop: int
    low: int
    window: int | None

    @property
    def queries(self) -> slice:
        """Cells of the row."""
        return slice(self.piece.start + self.start, self.piece.start + self.stop)

    @property
    def keys(self) -> tuple[slice, ...]:
        """Cells of the row: those of the prompt, if any is seen, and those of the piece."""
        shared, first = self.piece.shared, self.piece.start
        own = slice(first + max(0, self.low - shared), first + self.stop)
        if self.low >= shared:
            return (own,)
        return (slice(self.piece.prompt + self.low, self.piece.prompt + shared), own)

    @property
    def square(self) -> bool:
        """Whether queries and keys are the same, so that the mask is plainly causal."""
        return self.start == self.low == self.piece.shared == 0 and (
            self.window is None or self.stop <= self.window
        )

    def allowed(self, device: torch.device) -> Tensor:
        """Bool [Q, K]: which keys each query attends to."""
        shared = self.piece.shared
        queries = torch.arange(shared + self.start, shared + self.stop, device=device)[:, None]
        keys = torch.arange(self.low, shared + self.stop, device=device)
        seen = keys <= queries
        return seen if self.window is None else seen & (queries - keys < self.window)


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks [R, Q, K]: how many each row of blocks has, [R, 1, Q], and which, [R, 1, Q, K]."""
    order = seen.int().argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()
