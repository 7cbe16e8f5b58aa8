"""The key-value cache of the torch engine: up to S sequences ("rows"), each with its own length.

Live rows are always rows `[0, n)`, so a decode step reads a view of the cache and copies nothing.
Symbols: S slots, R rows and C columns held, H key-value heads, D head dimension, n live rows, m
rows prefilled with u different sequences, P the longest of them, L columns that attention looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache

_FIRST_COLUMNS = 64


@torch.inference_mode()
def cache_tokens(model: Any, mebibytes: int) -> int:
    """Tokens whose keys and values take so much memory: one is read to see."""
    cache = DynamicCache()
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    each = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return (mebibytes << 20) // each


class SlotCache(Cache):
    """A Transformers cache in which every row is written at its own position.

    Call `reserve`, and `begin_prefill`, `begin_extend` or `begin_decode`, before each forward pass
    of the model. Storage grows by doubling as sequences do, up to `capacity` tokens.

    Args:
        slots: rows at most.
        max_context: columns at most.
        capacity: tokens, rows times columns; at least `max_context`.
    """

    def __init__(self, slots: int, max_context: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_context = max_context
        self.capacity = capacity
        self.rows = 0
        self.columns = min(_FIRST_COLUMNS, max_context)
        self._keys: list[torch.Tensor] = []  # per layer [R, H, C, D]
        self._values: list[torch.Tensor] = []
        self._source: tuple[torch.Tensor, torch.Tensor] | None = None  # None: one token of each row
        self._target: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._seen_rows: torch.Tensor | None = None  # which they look at, if not at their own pass
        self._view: tuple[int, int] = (0, 0)

    def fits(self, rows: int, columns: int) -> bool:
        """Whether there is room for so many rows, the longest of so many columns."""
        return rows * columns <= self.capacity

    def reserve(self, rows: int, columns: int) -> None:
        """Have room for so many rows and columns, which fit. Rows `[0, rows)` keep what they hold.

        Rows beyond them may be lost.
        """
        if rows <= self.rows and columns <= self.columns:
            return
        if columns > self.columns:
            columns = max(columns, 2 * self.columns)
        else:
            columns = self.columns
        columns = min(columns, self.max_context, self.capacity // rows)
        held, kept = min(self.rows, rows), min(self.columns, columns)
        self.rows = max(rows, min(self.slots, self.capacity // columns, 2 * rows))
        self.columns = columns
        for stored in (self._keys, self._values):
            for layer, old in enumerate(stored):
                new = self._allocate(old)
                new[:held, :, :kept] = old[:held, :, :kept]
                stored[layer] = new

    def begin_prefill(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        which: Sequence[int],
        device: torch.device,
    ) -> None:
        """Next, sequences of `lengths` [u] are read, left-padded to the longest.

        Row `rows[i]` of the cache gets sequence `which[i]`, both [m].
        """
        longest = max(lengths)
        # Worked out on the CPU, so that a GPU does not have to be waited for.
        taken = torch.tensor(lengths)[list(which)]
        ends = taken.cumsum(0)
        columns = torch.arange(int(ends[-1])) - (ends - taken).repeat_interleave(taken)
        source_rows = torch.tensor(which).repeat_interleave(taken)
        target_rows = torch.tensor(rows).repeat_interleave(taken)
        padding = (longest - taken).repeat_interleave(taken)
        self._source = (source_rows.to(device), (columns + padding).to(device))
        self._target = (target_rows.to(device), columns.to(device))
        self._seen_rows = None

    def begin_extend(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[int],
        device: torch.device,
    ) -> None:
        """Next, `rows`, which hold `starts` tokens, get `lengths` more, left-padded; all three [m].

        Queries look at all that their row holds then.
        """
        self.begin_prefill(lengths, rows, range(len(rows)), device)
        first = torch.tensor(starts).repeat_interleave(torch.tensor(lengths)).to(device)
        self._target = (self._target[0], self._target[1] + first)
        self._seen_rows = torch.tensor(rows, device=device)
        ends = (start + length for start, length in zip(starts, lengths, strict=True))
        self._view = (len(rows), max(ends))

    def begin_decode(self, positions: torch.Tensor, columns: int) -> None:
        """Next, rows `[0, n)` get one token each at `positions` [n], all below `columns`."""
        count = positions.shape[0]
        self._target = (torch.arange(count, device=positions.device), positions)
        self._view = (count, columns)
        self._source = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what a layer computed and return what it attends to.

        Prefill: `[u, H, P, D]` in, the same out. Extension: `[m, H, P, D]` in, `[m, H, L, D]` out.
        Decode: `[n, H, 1, D]` in, `[n, H, L, D]` out.
        """
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, columns = self._target
        count, length = self._view
        if self._source is not None:
            source_rows, source_columns = self._source
            keys[rows, :, columns] = key_states[source_rows, :, source_columns]
            values[rows, :, columns] = value_states[source_rows, :, source_columns]
            if self._seen_rows is None:
                return key_states, value_states
            return keys[self._seen_rows, :, :length], values[self._seen_rows, :, :length]
        keys[rows, :, columns] = key_states[:, :, 0]
        values[rows, :, columns] = value_states[:, :, 0]
        return keys[:count, :, :length], values[:count, :, :length]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of rows `sources` over rows `targets`."""
        for stored in (*self._keys, *self._values):
            stored[list(targets), :, :length] = stored[list(sources), :, :length]

    def copy_of(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [H, length, D] of each layer, of the first tokens of a row."""
        pairs = zip(self._keys, self._values, strict=True)
        return [(k[row, :, :length].clone(), v[row, :, :length].clone()) for k, v in pairs]

    def put(
        self, row: int, states: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int
    ) -> None:
        """Row `row` begins with the first `length` tokens of `states`, which `copy_of` made."""
        for layer, (keys, values) in enumerate(states):
            self._keys[layer][row, :, :length] = keys[:, :length]
            self._values[layer][row, :, :length] = values[:, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the current view. The model never asks: positions and masks are given."""
        return self._view[1]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = states.shape
        return states.new_zeros(self.rows, heads, self.columns, dim)
