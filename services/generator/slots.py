"""The key-value cache of the torch engine: S sequences ("rows"), each with its own length.

Live rows are always rows `[0, n)`, so a decode step reads a view of the cache and copies nothing.
Symbols: S slots, H key-value heads, C columns held, D head dimension, n live rows, m rows
prefilled with u different sequences, P the longest of them, L columns that attention looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

_FIRST_COLUMNS = 64


class SlotCache(Cache):
    """A Transformers cache in which every row is written at its own position.

    Call `begin_prefill` or `begin_decode` before each forward pass of the model; storage grows in
    columns, by doubling, as sequences do, up to `max_context`.
    """

    def __init__(self, slots: int, max_context: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_context = max_context
        self.columns = min(_FIRST_COLUMNS, max_context)
        self._keys: list[torch.Tensor] = []  # per layer [S, H, C, D]
        self._values: list[torch.Tensor] = []
        self._prefilling = False
        self._source: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._target: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._view: tuple[int, int] = (0, 0)

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
        self._reserve(longest)
        # Worked out on the CPU, so that a GPU does not have to be waited for.
        taken = torch.tensor(lengths)[list(which)]
        ends = taken.cumsum(0)
        columns = torch.arange(int(ends[-1])) - (ends - taken).repeat_interleave(taken)
        source_rows = torch.tensor(which).repeat_interleave(taken)
        target_rows = torch.tensor(rows).repeat_interleave(taken)
        padding = (longest - taken).repeat_interleave(taken)
        self._source = (source_rows.to(device), (columns + padding).to(device))
        self._target = (target_rows.to(device), columns.to(device))
        self._prefilling = True

    def begin_decode(self, positions: torch.Tensor, columns: int) -> None:
        """Next, rows `[0, n)` get one token each at `positions` [n], all below `columns`."""
        self._reserve(columns)
        count = positions.shape[0]
        self._target = (torch.arange(count, device=positions.device), positions)
        self._view = (count, columns)
        self._prefilling = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what a layer computed and return what it attends to.

        Prefill: `[u, H, P, D]` in, the same out. Decode: `[n, H, 1, D]` in, `[n, H, L, D]` out.
        """
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, columns = self._target
        if self._prefilling:
            source_rows, source_columns = self._source
            keys[rows, :, columns] = key_states[source_rows, :, source_columns]
            values[rows, :, columns] = value_states[source_rows, :, source_columns]
            return key_states, value_states
        keys[rows, :, columns] = key_states[:, :, 0]
        values[rows, :, columns] = value_states[:, :, 0]
        count, length = self._view
        return keys[:count, :, :length], values[:count, :, :length]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of rows `sources` over rows `targets`."""
        for stored in (*self._keys, *self._values):
            stored[list(targets), :, :length] = stored[list(sources), :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the current view. The model never asks: positions and masks are given."""
        return self._view[1]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = states.shape
        return states.new_zeros(self.slots, heads, self.columns, dim)

    def _reserve(self, columns: int) -> None:
        if columns <= self.columns:
            return
        grown = min(max(columns, 2 * self.columns), self.max_context)
        for stored in (self._keys, self._values):
            for layer, old in enumerate(stored):
                new = old.new_zeros(*old.shape[:2], grown, old.shape[3])
                new[:, :, : self.columns] = old
                stored[layer] = new
        self.columns = grown
