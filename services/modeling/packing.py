"""Sequences of different lengths to dense micro-batches, so that little work is spent on padding.

Several sequences share a row; position ids restart at each and a block-diagonal causal mask keeps
them apart, so that every logprob is the one of its sequence alone. Rows are filled first-fit
decreasing (Johnson 1974: at most 11/9 of the fewest rows possible, and one more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """S sequences laid end to end, and the M tokens of them that are learned.

    A learned token is predicted from what precedes it in its sequence, so it is never the first.
    """

    ids: Tensor  # int64 [sum of lengths]
    lengths: Tensor  # int64 [S]
    learned: Tensor  # int64 [M], indices into ids, ascending
    owner: Tensor  # int64 [M], the sequence that each learned token belongs to


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R rows of L tokens for one forward pass, in which N learned tokens are predicted."""

    input_ids: Tensor  # int64 [R, L]
    position_ids: Tensor  # int64 [R, L], from 0 in every sequence
    mask: Tensor | None  # bool [R, 1, L, L], True = attend; None: plain causal attention is exact
    index: Tensor  # int64 [N], flat positions in [R * L] that predict the learned tokens
    targets: Tensor  # int64 [N], the learned tokens
    source: Tensor  # int64 [N], which of the M learned tokens these are

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        mask = None if self.mask is None else self.mask.to(device)
        return MicroBatch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            mask,
            self.index.to(device),
            self.targets.to(device),
            self.source.to(device),
        )


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in rows of at most `capacity`; one that is longer has a row alone."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(item)
        room[row] -= length
    return rows


def pack(
    tokens: Tokens,
    *,
    pack_tokens: int,
    micro_tokens: int,
    sequences: Tensor | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `micro_tokens`, padding included, of rows of at most `pack_tokens`.

    A longer sequence has a row alone, and a longer row a micro-batch. Rows of less than half the
    width start a new micro-batch, so that one long sequence does not stretch all others.

    `sequences` (int64) restricts it to those sequences. What is fed of a sequence ends before its
    last token, which predicts nothing.
    """
    chosen = torch.arange(len(tokens.lengths)) if sequences is None else sequences
    fed = (tokens.lengths[chosen] - 1).tolist()
    rows = first_fit_decreasing(fed, pack_tokens)
    sums = [sum(fed[item] for item in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -sums[row])
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        width = sums[order[start]]
        limit = min(len(order), start + max(1, micro_tokens // width))
        narrow = (at for at in range(start, limit) if 2 * sums[order[at]] < width)
        stop = next(narrow, limit)
        if stop == len(order) - 1 < limit:
            stop = limit  # a single row left over costs less as padding than as another pass
        members = [[int(chosen[item]) for item in rows[row]] for row in order[start:stop]]
        batches.append(_lay_out(tokens, members, width))
        start = stop
    return batches


def _lay_out(tokens: Tokens, rows: list[list[int]], width: int) -> MicroBatch:
    """Rows of sequence indices as one micro-batch of rows `width` tokens wide."""
    sequences = torch.tensor([s for row in rows for s in row])
    row_of = torch.tensor([r for r, row in enumerate(rows) for _ in row])
    fed = tokens.lengths[sequences] - 1
    # Where each sequence begins in the flat rows: after those before it in the same row.
    before = fed.cumsum(0) - fed
    first_of_row = torch.tensor([len(row) for row in rows]).cumsum(0)
    row_base = torch.cat([before.new_zeros(1), fed.cumsum(0)[first_of_row[:-1] - 1]])
    start = row_of * width + before - row_base[row_of]

    within = torch.arange(int(fed.sum())) - before.repeat_interleave(fed)
    place = start.repeat_interleave(fed) + within
    offset = tokens.lengths.cumsum(0) - tokens.lengths
    cells = len(rows) * width
    input_ids = torch.zeros(cells, dtype=torch.int64)
    input_ids[place] = tokens.ids[offset[sequences].repeat_interleave(fed) + within]
    # Padding goes on counting, so that a row of one sequence looks like an ordinary one.
    position_ids = torch.arange(width).repeat(len(rows))
    position_ids[place] = within

    start_of = torch.full((len(tokens.lengths),), -1)
    start_of[sequences] = start
    source = (start_of[tokens.owner] >= 0).nonzero().squeeze(1)
    learned, owner = tokens.learned[source], tokens.owner[source]
    index = start_of[owner] + learned - offset[owner] - 1

    mask = None
    if any(len(row) > 1 for row in rows):
        segment = torch.full((cells,), -1)
        segment[place] = torch.arange(len(sequences)).repeat_interleave(fed)
        segment = segment.view(len(rows), width)
        # Padding attends within itself: a row of the mask without any True would give NaN.
        mask = (segment[:, :, None] == segment[:, None, :]).tril().unsqueeze(1)
    return MicroBatch(
        input_ids.view(len(rows), width),
        position_ids.view(len(rows), width),
        mask,
        index,
        tokens.ids[learned],
        source,
    )
