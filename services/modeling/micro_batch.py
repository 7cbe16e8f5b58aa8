"""The tensors of one forward pass: rows in which sequences lie side by side, and what each sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from umbra.proto.records import Trajectory
from umbra.services.modeling.experts import UNKNOWN, chosen_experts

BLOCK = 128  # positions of a block of flex_attention, its default


class RowBlocks(BlockMask):
    """The mask of flex_attention for rows."""

    windowed = False
    """True if attention has a sliding window, which takes a kernel of its own."""


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
        """Return the same with that window; None if it is wider than any row."""
        reach = window if window is None or window < self.positions.shape[1] else None
        return replace(self, window=reach)

    def allowed(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return bool [R, Q, L]: the positions that those from `start` to `stop` attend to."""
        width = self.positions.shape[1]
        index = torch.arange(width, device=self.positions.device)
        rows = slice(start, stop)
        allowed = index[None, None, :] <= index[None, rows, None]
        if self.segment is not None and self.prefix is not None:
            keys = self.segment[:, None, :]
            # Padding attends within itself: a row of the mask without any True would give NaN.
            same = self.segment[:, rows, None] == keys
            allowed = allowed & (same | (self.prefix[:, rows, None] == keys))
        if self.window is not None:
            behind = self.positions[:, rows, None] - self.positions[:, None, :]
            allowed = allowed & (behind < self.window)
        return allowed.expand(len(self.positions), -1, -1)

    def blocks(self) -> RowBlocks:
        """Return the mask of flex_attention, without one of all pairs in memory.

        It has two blocks at least, and segments: each case less is a kernel less to compile.
        """
        mask = self._filled(max(self.positions.shape[1], 2 * BLOCK))
        rows, width = mask.positions.shape
        across = -(-width // BLOCK)
        kinds: list[Tensor] = []
        for start in range(0, width, BLOCK):
            allowed = pad(mask.allowed(start, start + BLOCK), (0, across * BLOCK - width))
            cells = allowed.view(rows, -1, across, BLOCK)
            # A block at the edge is not full, though all of it that exists is seen.
            full = cells.all(3).all(1) & (start + BLOCK <= width)
            kinds.append(torch.stack([cells.any(3).any(1) & ~full, full]))
        partial, whole = map(_listed, torch.stack(kinds, 2))  # [R, blocks, blocks]
        blocks = RowBlocks.from_kv_blocks(
            *partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=mask._rule(), seq_lengths=(width, width)
        )
        assert isinstance(blocks, RowBlocks)
        blocks.windowed = mask.window is not None
        for value in (*vars(blocks).values(), mask.positions, mask.segment, mask.prefix):
            if isinstance(value, Tensor):  # [R, ...] of positions, or [R, 1, ...] of blocks
                varied = [dim for dim in range(value.ndim) if dim != 1 or value.ndim == 2]
                torch._dynamo.maybe_mark_dynamic(value, varied)
        return blocks

    def _filled(self, width: int) -> RowMask:
        """Return this mask with segments, padded to rows of `width` positions."""
        padding = (0, width - self.positions.shape[1])
        zeros = torch.zeros_like(self.positions, dtype=torch.int32)
        segment = zeros if self.segment is None else self.segment
        prefix = zeros if self.prefix is None else self.prefix
        segment, prefix = (pad(x, padding, value=-1) for x in (segment, prefix))
        return RowMask(pad(self.positions, padding), segment, prefix, self.window)

    def _rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return `mask_mod` of flex_attention: `allowed` of a single pair."""
        positions, segment, prefix, window = self.positions, self.segment, self.prefix, self.window
        assert segment is not None and prefix is not None
        # A number would be compiled into the kernel.
        reach = None if window is None else torch.full((), window, device=positions.device)

        def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            key_segment = segment[row, key]
            allowed = (segment[row, query] == key_segment) | (prefix[row, query] == key_segment)
            allowed = (key <= query) & allowed
            if reach is not None:
                allowed = allowed & (positions[row, query] - positions[row, key] < reach)
            return allowed

        return rule


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of the blocks [R, Q, K] each row has, [R, 1, Q], and which, [R, 1, Q, K]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()


@dataclass(frozen=True, slots=True)
class Supports:
    """Which ids could have been drawn in the place of each of M learned tokens, K in all."""

    sizes: Tensor  # int64 [M]
    ids: Tensor  # int64 [K], token by token
    logprobs: Tensor  # float32 [K] by the sampler; [0] where not reported
    whole: Tensor  # bool [M], where these are all that could; else they are the likeliest

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], counts: Tensor) -> Supports | None:
        """Return supports of each trajectory's `counts` learned tokens; None if none has any."""
        if all(t.support is None for t in trajectories):
            return None
        sizes: list[NDArray[Any]] = []
        ids, logprobs = bytearray(), bytearray()
        for trajectory, count in zip(trajectories, counts.tolist(), strict=True):
            if (support := trajectory.support) is None:
                sizes.append(np.zeros(count, "<u2"))
                continue
            of_response = np.frombuffer(support.sizes, "<u2")
            sizes.append(of_response[of_response > 0])
            ids += support.ids
            logprobs += support.logprobs or b""
        whole = torch.tensor([t.support is not None and t.sampling.cuts_off for t in trajectories])
        return cls(
            torch.from_numpy(np.concatenate(sizes).astype(np.int64)),
            torch.from_numpy(np.frombuffer(ids, "<i4").astype(np.int64)),
            torch.from_numpy(np.frombuffer(logprobs, "<f4").copy()),
            whole.repeat_interleave(counts),
        )

    def rows(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places in `ids` of the support of `source`, [N, k], and which of them exist.

        k is the most that any of these tokens has, 1 at least.
        """
        sizes = self.sizes[source]
        column = torch.arange(max(1, int(sizes.max())) if len(sizes) else 1)
        starts = (self.sizes.cumsum(0) - self.sizes)[source]
        exists = column < sizes[:, None]
        return torch.where(exists, starts[:, None] + column, 0), exists


@dataclass(frozen=True, slots=True)
class Tokens:
    """S sequences laid end to end, and the M tokens of them that are learned.

    A learned token is predicted from what precedes it in its sequence, so it is never the first.
    Sequences of one `family` begin with the same `prompts[s]` tokens, none of which is learned.
    """

    ids: Tensor  # int64 [sum of lengths]
    lengths: Tensor  # int64 [S]
    learned: Tensor  # int64 [M], indices into ids, ascending
    owner: Tensor  # int64 [M], the sequence that each learned token belongs to
    prompts: Tensor | None = None  # int64 [S], at least 1 and less than the length
    family: Tensor | None = None  # int64 [S]
    routing: Sequence[NDArray[np.integer[Any]]] | None = None
    """By sequence, the experts that its first R tokens met, [R, layers, choices]; the same for
    the prompts of a family."""
    support: Supports | None = None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], *, replay: bool = False) -> Tokens:
        """Lay out `trajectories`, with their routing if it is to be replayed.

        Tokens that the policy sampled are learned; those with the same prompt are of one family.
        """
        ids: list[NDArray[Any]] = []
        learned: list[NDArray[Any]] = []
        prompts: list[int] = []
        lengths: list[int] = []
        family: dict[tuple[bytes, bytes], int] = {}
        families: list[int] = []
        start = 0
        for trajectory in trajectories:
            prompt = np.frombuffer(trajectory.prompt_ids, "<i4")
            response = np.frombuffer(trajectory.response_ids, "<i4")
            ids += [prompt, response]
            sampled = np.flatnonzero(np.frombuffer(trajectory.loss_mask, "u1"))
            learned.append(sampled + (start + len(prompt)))
            prompts.append(len(prompt))
            lengths.append(len(prompt) + len(response))
            start += lengths[-1]
            chosen, routing = b"", trajectory.routing
            if replay and routing is not None:
                chosen = routing.chosen[: len(prompt) * routing.token_bytes]
            families.append(family.setdefault((trajectory.prompt_ids, chosen), len(family)))
        counts = torch.tensor([len(positions) for positions in learned])
        return cls(
            ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            lengths=torch.tensor(lengths),
            learned=torch.from_numpy(np.concatenate(learned)),
            owner=torch.arange(len(lengths)).repeat_interleave(counts),
            prompts=torch.tensor(prompts),
            family=torch.tensor(families),
            routing=[chosen_experts(t) for t in trajectories] if replay else None,
            support=Supports.of(trajectories, counts),
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that lie together in a row: one alone, or several behind one copy of a prompt."""

    sequences: tuple[int, ...]
    prompt: int  # tokens that they share; 0: nothing is shared
    fed: int  # tokens in the row
    cost: float = 0.0  # of feeding it


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R rows of L tokens for one forward pass, in which N learned tokens are predicted.

    A position sees tokens before it in its own segment and in the one that is its prefix: `mask`.
    """

    input_ids: Tensor  # int64 [R, L]
    position_ids: Tensor  # int64 [R, L], from 0 in every sequence
    index: Tensor  # int64 [N], flat positions in [R * L] that predict the learned tokens
    targets: Tensor  # int64 [N], the learned tokens
    source: Tensor  # int64 [N], which of the M learned tokens these are; on the CPU
    tokens: int  # of R * L, those that are not padding
    fed: Tensor  # bool [R, L], which these are
    segment: Tensor | None = None  # int32 [R, L], -1 for padding; None: one sequence in each row
    prefix: Tensor | None = None  # int32 [R, L], segment of the prompt; its own if not shared
    routing: Tensor | None = None  # int16 [R, L, layers, choices], as `Routers.replay`
    support: Tensor | None = None  # int64 [N, k], ids that could have been drawn; -1 = none
    whole: Tensor | None = None  # bool [N], where these are all that could

    @property
    def mask(self) -> RowMask:
        return RowMask(self.position_ids, self.segment, self.prefix)

    def to(self, device: torch.device) -> MicroBatch:
        moved = {
            name: value.to(device)
            for name in self.__slots__
            if name != "source" and isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)


def lay_out(tokens: Tokens, rows: list[list[Unit]]) -> MicroBatch:
    """Return `rows` as tensors; without any row a single cell, in which nothing is learned."""
    width = max([1, *(sum(unit.fed for unit in row) for row in rows)])
    count = max(1, len(rows))
    offset = (tokens.lengths.cumsum(0) - tokens.lengths).tolist()
    length = tokens.lengths.tolist()
    # What lies where: first cell, sequence, number of tokens, first position, segment, prefix.
    pieces: list[tuple[int, int, int, int, int, int]] = []
    # Of each sequence: its prompt's cell, its own cell, its prompt's length.
    homes = [(-1, -1, -1)] * len(length)
    for number, row in enumerate(rows):
        cell = number * width
        for unit in row:
            home, prefix = cell, len(pieces)
            if unit.prompt:
                pieces.append((cell, unit.sequences[0], unit.prompt, 0, prefix, prefix))
                cell += unit.prompt
            for item in unit.sequences:
                fed = length[item] - 1 - unit.prompt
                pieces.append((cell, item, fed, unit.prompt, len(pieces), prefix))
                homes[item] = home, cell, unit.prompt
                cell += fed
    table = torch.tensor(pieces, dtype=torch.int64).view(-1, 6)
    sizes = table[:, 2]
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    by_token = table.repeat_interleave(sizes, dim=0)
    first_cell, sequence, _, first, segment, prefix_of = by_token.unbind(1)
    place, position = first_cell + within, first + within
    start = torch.tensor(offset, dtype=torch.int64)
    input_ids = torch.zeros(count * width, dtype=torch.int64)
    input_ids[place] = tokens.ids[start[sequence] + position]
    # Padding goes on counting, so that a row of one sequence looks like an ordinary one.
    position_ids = torch.arange(width).repeat(count)
    position_ids[place] = position
    fed = torch.zeros(count * width, dtype=torch.bool).index_fill_(0, place, True)

    def cells(values: Tensor) -> Tensor:
        values_by_cell = torch.full((count * width,), -1, dtype=torch.int32)
        values_by_cell[place] = values.int()
        return values_by_cell.view(count, width)

    several = len(pieces) > len(rows)
    home_of = torch.tensor(homes, dtype=torch.int64).view(-1, 3)
    source = (home_of[tokens.owner, 0] >= 0).nonzero().squeeze(1)
    learned, owner = tokens.learned[source], tokens.owner[source]
    predictor = learned - 1 - start[owner]  # position that predicts, in its sequence
    prompt_cell, own_cell, prompt = home_of[owner].unbind(1)
    index = torch.where(predictor < prompt, prompt_cell + predictor, own_cell + predictor - prompt)
    support = whole = None
    if tokens.support is not None:
        places, exists = tokens.support.rows(source)
        support = torch.where(exists, tokens.support.ids[places], -1)
        whole = tokens.support.whole[source]
    return MicroBatch(
        input_ids=input_ids.view(count, width),
        position_ids=position_ids.view(count, width),
        index=index,
        targets=tokens.ids[learned],
        source=source,
        tokens=len(place),
        fed=fed.view(count, width),
        segment=cells(segment) if several else None,
        prefix=cells(prefix_of) if several else None,
        routing=_routing(tokens, pieces, count, width),
        support=support,
        whole=whole,
    )


def _routing(
    tokens: Tokens, pieces: list[tuple[int, int, int, int, int, int]], count: int, width: int
) -> Tensor | None:
    """Return the experts for each cell, int16 [R, L, layers, choices], if any are known.

    A shared prompt has the routing of the unit's first sequence: the others have the same.
    """
    if tokens.routing is None or not len(tokens.routing):
        return None
    routing = np.full((count * width, *tokens.routing[0].shape[1:]), UNKNOWN, np.int16)
    for cell, sequence, size, first, _, _ in pieces:
        experts = tokens.routing[sequence][first : first + size]
        routing[cell : cell + len(experts)] = experts
    return torch.from_numpy(routing).unflatten(0, (count, width))
