"""The key-value cache of the torch engine: S sequences ("rows"), each with its own length.

A pass of the model gets one row of T tokens, laid end to end: the newest token of each live row,
then the contexts of rows that have none in the cache yet. Live rows are always rows `[0, n)`, so
attention reads a view of the cache and copies nothing. Where layers carry a state from token to
token (a convolution's last inputs, a recurrence), a pass gets n newest tokens as a batch, or one
context; Transformers' own layers of a cache read and write the states, of which rows keep copies.
Symbols: R rows and C columns held, G key-value heads, D head dimension, n live rows, L columns that
attention looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from umbra.services.modeling.attention_backends import Context

_FIRST_COLUMNS = 64
_Place = tuple[int, str, int]  # layer, kind of state, its number within the layer


class SlotCache(Cache):
    """A Transformers cache in which every token is written to a row and a column of its own.

    Call `reserve` and `begin` before each forward pass of the model, `end` after it. Storage
    doubles as sequences grow, up to `slots` rows of `max_context` columns. `config` is
    Transformers', of a model whose layers carry states.
    """

    def __init__(self, slots: int, max_context: int, config: Any = None) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_context = max_context
        self.rows = 0
        self.columns = min(_FIRST_COLUMNS, max_context)
        self._config = config
        self._keys: dict[int, torch.Tensor] = {}  # per layer [R, C, G, D]
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[_Place, torch.Tensor] = {}  # [R, ...]
        self._takers: Sequence[int] = ()  # rows whose states the pass begins
        self._target = torch.empty(0, dtype=torch.long)  # cells row * C + column
        self._source: torch.Tensor | None = None  # tokens that they get; None: each in its turn
        self._view: tuple[int, int] = (0, 0)

    def reserve(self, rows: int, columns: int) -> None:
        """Resize to so many rows and columns; rows `[0, rows)` keep their contents."""
        if rows <= self.rows and columns <= self.columns:
            return
        before, columns_before = self.rows, self.columns
        if rows > before:
            self.rows = max(rows, min(2 * before, self.slots))
        if columns > columns_before:
            self.columns = max(columns, min(2 * columns_before, self.max_context))
        for stored in (self._keys, self._values):
            for layer, old in stored.items():
                new = old.new_zeros(self.rows, self.columns, *old.shape[2:])
                new[:before, :columns_before] = old
                stored[layer] = new
        for place, old in self._states.items():
            more = old.new_zeros(self.rows - before, *old.shape[1:])
            self._states[place] = torch.cat((old, more))

    def begin(
        self,
        newest: torch.Tensor,
        contexts: Sequence[Context],
        takers: Sequence[Sequence[int]],
        view: tuple[int, int],
    ) -> None:
        """Give rows `[0, len(newest))` a token each next, then read `contexts`.

        `newest` are the columns of the rows' tokens, int64; `takers` the rows that each context is
        written to; `view` how many rows and columns attention looks at.
        """
        self._view = view
        count, device = len(newest), newest.device
        target = torch.arange(count, device=device) * self.columns + newest
        self._source = None
        cells: list[int] = []
        tokens = list(range(count))
        start = count
        for context, rows in zip(contexts, takers, strict=True):
            for first in (row * self.columns for row in rows):
                cells += range(first, first + context.length)
                tokens += range(start, start + context.length)
            start += context.length
        self._target = torch.cat((target, torch.tensor(cells, device=device))) if cells else target
        if len(tokens) > start:
            self._source = torch.tensor(tokens, device=device)
        if self._config is not None:
            self._begin_states(count, takers)

    def _begin_states(self, count: int, takers: Sequence[Sequence[int]]) -> None:
        """Give the layers the states of rows `[0, count)`, and none to read a context with."""
        self.layers = DynamicCache(config=self._config).layers
        self._takers = takers[0] if takers else () if self._states else range(count)
        if self._takers:
            return
        for (layer, kind, number), states in self._states.items():
            cached: Any = self.layers[layer]
            getattr(cached, kind)[number] = states[:count]  # written in place
            getattr(cached, f"is_{kind}_initialized")[number] = True
            cached.has_previous_state[number] = True
            cached.conv_kernel_size[number] = cached.conv_kernel_size[number] or states.shape[-1]

    def end(self) -> None:
        """Keep the states that a pass began."""
        for layer, cached in enumerate(self.layers if self._takers else ()):
            if not isinstance(cached, LinearAttentionLayer):
                continue
            for kind in ("conv_states", "recurrent_states"):
                for number, state in getattr(cached, kind).items():
                    if state is None:
                        continue
                    place = layer, kind, number
                    if place not in self._states:
                        self._states[place] = state.new_zeros(self.rows, *state.shape[1:])
                    self._states[place][list(self._takers)] = state

    def clear(self, rows: Sequence[int]) -> None:
        """Let `rows` begin without a state."""
        for states in self._states.values():
            states[list(rows)] = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of a layer; return all that live rows hold.

        `[1, G, T, D]` in, or `[n, G, 1, D]`; `[n, G, L, D]` out.
        """
        rows, columns = self._view
        views: list[torch.Tensor] = []
        for stored, states in ((self._keys, key_states), (self._values, value_states)):
            if layer_idx not in stored:
                _, heads, _, dim = states.shape
                stored[layer_idx] = states.new_zeros(self.rows, self.columns, heads, dim)
            cells, tokens = stored[layer_idx], states.transpose(1, 2).flatten(0, 1)
            if self._source is not None:
                tokens = tokens[self._source]
            cells.flatten(0, 1).index_copy_(0, self._target, tokens)
            views.append(cells[:rows, :columns].transpose(1, 2))
        return views[0], views[1]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` columns of rows `sources` over rows `targets`."""
        for stored in (*self._keys.values(), *self._values.values()):
            stored[list(targets), :length] = stored[list(sources), :length]
        for states in self._states.values():
            states[list(targets)] = states[list(sources)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of the current view; models do not ask."""
        return self._view[1]
