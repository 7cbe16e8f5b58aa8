"""The fullest micro-batches: rows without padding, all of whose tokens are learned."""

from __future__ import annotations

from typing import NamedTuple

import torch

from umbra.services.modeling.micro_batch import MicroBatch, Tokens, Unit, lay_out


class RowShape(NamedTuple):
    """Rows of a micro-batch; two sequences lie in a row that is packed."""

    number: int
    width: int
    packed: bool = True


def full_rows(rows: RowShape) -> MicroBatch:
    """`rows` whose tokens but the first of each sequence are learned."""
    width = rows.width
    halves = (width - width // 2, width // 2) if rows.packed and width > 1 else (width,)
    fed = [half for _ in range(rows.number) for half in halves]
    lengths = torch.tensor(fed) + 1  # the last token is not fed
    total = int(lengths.sum())
    learned = torch.ones(total, dtype=torch.bool)
    learned[lengths.cumsum(0) - lengths] = False
    owner = torch.arange(len(fed)).repeat_interleave(lengths)
    tokens = Tokens(
        ids=torch.zeros(total, dtype=torch.int64),
        lengths=lengths,
        learned=learned.nonzero().squeeze(1),
        owner=owner[learned],
    )
    each = len(halves)
    units = [
        [Unit((row * each + at,), 0, fed[row * each + at]) for at in range(each)]
        for row in range(rows.number)
    ]
    return lay_out(tokens, units)
