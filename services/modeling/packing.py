"""Sequences of different lengths to dense micro-batches, so that little work is spent on padding.

Several sequences share a row, and the attention mask keeps them apart, so that every logprob is the
one of its sequence alone. Sequences that begin with the same prompt may share one copy of it, which
is computed once and gets the sum of their gradients. Rows are filled first-fit decreasing (Johnson
1974: at most 11/9 of the fewest rows possible, and one more).

Ranks get equal shares in equally many micro-batches, the costliest first, as a pass takes as long
as on the slowest rank. Of shares of equal cost and of equally many tokens those are taken with
which all are done earlier: where lengths have a long tail, equal costs let a rank idle in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import Tensor

from umbra.services.modeling.micro_batch import MicroBatch, Tokens, Unit, lay_out

Row = list[Unit]


def pack(
    tokens: Tokens,
    *,
    pack_tokens: int,
    micro_tokens: int,
    sequences: Tensor | None = None,
    share_prompts: bool = False,
    rank: int = 0,
    world: int = 1,
    pair_cost: float = 0.0,
) -> list[MicroBatch]:
    """Return micro-batches of at most `micro_tokens`, padding included, in rows of `pack_tokens`.

    A longer sequence has a row alone, and a longer row a micro-batch. Rows of less than half the
    width start a new micro-batch, so that one long sequence does not stretch all others. The last
    token of a sequence is not fed: it predicts nothing.

    Args:
        tokens: the same on all ranks.
        sequences: int64, restricts it to those sequences.
        share_prompts: sequences of one `tokens.family` share their prompt where a row has room.
        rank: gets its share of `world` shares, which differ by at most the largest unit (a
            sequence, or a prompt and its responses). One with fewer micro-batches splits its
            largest, and fills up with empty ones.
        pair_cost: of a token and one that it attends to, where feeding a token costs 1.
    """
    chosen = range(len(tokens.lengths)) if sequences is None else sequences.tolist()
    units = _units(tokens, chosen, pack_tokens, share_prompts, pair_cost)
    plans = min(
        (
            _plans(_shares(units, world, size), pack_tokens, micro_tokens)
            for size in (attrgetter("cost"), attrgetter("fed"))
        ),
        # Each pass takes as long as on the slowest rank.
        key=lambda plans: sum(max(map(_cost, passes)) for passes in zip(*plans, strict=True)),
    )
    return [lay_out(tokens, rows) for rows in plans[rank]]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `lengths` in rows of at most `capacity`; a longer one has a row alone."""
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


def _units(
    tokens: Tokens, chosen: Sequence[int], capacity: int, share: bool, pair_cost: float
) -> list[Unit]:
    """Return the units that stay within a row: sequences, or a prompt with its responses."""
    lengths = tokens.lengths.tolist()

    def unit(items: tuple[int, ...], prompt: int) -> Unit:
        ends = [lengths[item] - 1 for item in items]
        fed = prompt + sum(end - prompt for end in ends)
        # The prompt once, and each response behind it; twice the pairs, about.
        squares = prompt**2 + sum(end**2 - prompt**2 for end in ends)
        return Unit(items, prompt, fed, fed + pair_cost * squares / 2)

    if not share or tokens.family is None or tokens.prompts is None:
        return [unit((item,), 0) for item in chosen]
    prompts, family = tokens.prompts.tolist(), tokens.family.tolist()
    families: dict[int, list[int]] = {}
    for item in chosen:
        families.setdefault(family[item], []).append(item)
    units: list[Unit] = []
    for members in families.values():
        prompt = prompts[members[0]]
        fed = [lengths[item] - 1 - prompt for item in members]
        for together in first_fit_decreasing(fed, max(0, capacity - prompt)):
            items = tuple(members[index] for index in together)
            units.append(unit(items, prompt if len(items) > 1 else 0))
    return units


def _shares(units: list[Unit], world: int, size: Callable[[Unit], float]) -> list[list[Unit]]:
    """Return the units of each rank: the largest first, always to the rank that has least.

    Graham 1969: the rank that has most has at most 4/3 of what it would have at best.
    """
    shares: list[list[Unit]] = [[] for _ in range(world)]
    load = [0.0] * world
    for unit in sorted(units, key=size, reverse=True):
        rank = load.index(min(load))
        shares[rank].append(unit)
        load[rank] += size(unit)
    return shares


def _plans(shares: list[list[Unit]], pack_tokens: int, micro_tokens: int) -> list[list[list[Row]]]:
    """Return each rank's micro-batches, equally many, the costliest first."""
    plans = [_plan(share, pack_tokens, micro_tokens) for share in shares]
    count = max(len(plan) for plan in plans)
    return [sorted(_extended(plan, count), key=_cost, reverse=True) for plan in plans]


def _cost(rows: list[Row]) -> float:
    return sum(unit.cost for row in rows for unit in row)


def _plan(units: list[Unit], pack_tokens: int, micro_tokens: int) -> list[list[Row]]:
    filled = first_fit_decreasing([unit.fed for unit in units], pack_tokens)
    rows = [[units[item] for item in row] for row in filled]
    sums = [sum(unit.fed for unit in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -sums[row])
    plan: list[list[Row]] = []
    start = 0
    while start < len(order):
        width = max(1, sums[order[start]])
        limit = min(len(order), start + max(1, micro_tokens // width))
        narrow = (at for at in range(start, limit) if 2 * sums[order[at]] < width)
        stop = next(narrow, limit)
        if stop == len(order) - 1 < limit:
            stop = limit  # a single row left over costs less as padding than as another pass
        plan.append([rows[row] for row in order[start:stop]])
        start = stop
    return plan


def _extended(plan: list[list[Row]], count: int) -> list[list[Row]]:
    """Extend `plan` to `count` micro-batches: halve its largest, then add empty ones."""
    plan = list(plan)
    while len(plan) < count:
        most = max(range(len(plan)), key=lambda at: len(plan[at]), default=None)
        if most is None or len(plan[most]) < 2:
            return plan + [[] for _ in range(count - len(plan))]
        rows = plan[most]
        plan[most : most + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return plan
