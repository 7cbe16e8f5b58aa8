"""Rows whose tokens several ranks share (Ulysses sequence parallelism, arXiv 2309.14509).

Each of N ranks has 1/N of the tokens of every row. For attention, which alone does not work token
by token, ranks exchange: each gives its tokens, gets all tokens of 1/N of the heads, attends to
whole rows as one rank does, and exchanges back. The backward pass exchanges in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from umbra.proto.errors import UsageError
from umbra.services.modeling.architectures import check_heads
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.attention_backends import NAME
from umbra.services.modeling.experts import UNKNOWN
from umbra.services.modeling.micro_batch import MicroBatch

_ARGUMENT = "sequence_share"  # of forward passes, handed on to the attention of each layer
_SHARED = f"{NAME}-shared"  # our attention between two exchanges, in Transformers


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The `size` ranks that share rows; this is number `rank` of them."""

    group: dist.ProcessGroup
    rank: int
    size: int


class SequenceShare:
    """One rank's part of a micro-batch with N learned tokens.

    `rows` are the whole, padded to a multiple of the ranks; `own` has this rank's columns of them,
    with the segments and prefixes of `rows`; `learned`, int64, are the learned tokens predicted
    there. No dataclass: FSDP, which casts the inputs of a layer, would hand each layer a copy.
    """

    def __init__(
        self, group: SequenceGroup, rows: MicroBatch, own: MicroBatch, learned: Tensor
    ) -> None:
        self.group = group
        self.rows = rows
        self.own = own
        self.learned = learned
        self.layers = 0  # that have attended in this pass

    def join(self, values: Tensor) -> Tensor:
        """Return the values [N, ...] of all learned tokens; each rank gives its own, [n, ...].

        Each rank's gradient is its own values', so a loss that all ranks compute alike counts
        once.
        """
        return _Join.apply(values, self)  # pyright: ignore[reportReturnType]


class SequenceParallel:
    """A wrapper by which a model attends to whole rows while it gets a share of their tokens.

    The attention of `Attention.prepare` is put between two exchanges.

    Raises:
        UsageError: the model's query heads cannot be divided by the ranks.
    """

    def __init__(self, model: PreTrainedModel, attention: Attention, group: SequenceGroup) -> None:
        self._group = group
        self._class = type(model).__name__
        config: Any = model.config.get_text_config()
        self._layers: int = config.num_hidden_layers
        check_heads(config.to_dict(), group.size)
        self._windows = any(window is not None for _, window in attention.windows)
        model.set_attn_implementation(_SHARED)

    def share(self, batch: MicroBatch) -> SequenceShare:
        """Return this rank's part of `batch`, whose tensors are where the model is."""
        group = self._group
        rows = _padded(batch, group.size)
        if rows.segment is None and self._windows:
            # Without a mask the model's class would make one, for the tokens that it has.
            segment = torch.zeros_like(rows.input_ids, dtype=torch.int32)
            rows = replace(rows, segment=segment, prefix=segment)
        width = rows.input_ids.shape[1]
        columns = width // group.size
        row, column = rows.index // width, rows.index % width
        learned = (column // columns == group.rank).nonzero().squeeze(1)
        first = group.rank * columns

        def cut(cells: Tensor) -> Tensor:
            return cells[:, first : first + columns]

        own = replace(
            rows,
            input_ids=cut(rows.input_ids),
            position_ids=cut(rows.position_ids),
            fed=cut(rows.fed),
            routing=None if rows.routing is None else cut(rows.routing),
            index=(row * columns + column - first)[learned],
            targets=rows.targets[learned],
            support=None if rows.support is None else rows.support[learned],
            whole=None if rows.whole is None else rows.whole[learned],
            source=rows.source[learned.cpu()],
        )
        return SequenceShare(group, rows, own, learned)

    def run(self, share: SequenceShare, forward: Callable[..., Any]) -> Any:
        """Call `forward` on a share; refuse a model whose layers did not all exchange."""
        output = forward(**{_ARGUMENT: share})
        if share.layers != self._layers:
            raise UsageError(
                f"trainer.sequence_parallel needs Transformers' attention interface, and only "
                f"{share.layers} of the {self._layers} layers of {self._class} use it: set it to 1"
            )
        return output


def _padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Pad rows to a multiple of so many tokens."""
    width = batch.input_ids.shape[1]
    padding = -width % multiple
    if not padding:
        return batch
    after, routing = (0, padding), batch.routing
    further = torch.arange(1, padding + 1, device=batch.position_ids.device)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, after),
        position_ids=torch.cat([batch.position_ids, batch.position_ids[:, -1:] + further], 1),
        index=batch.index + batch.index // width * padding,
        segment=None if batch.segment is None else pad(batch.segment, after, value=-1),
        prefix=None if batch.prefix is None else pad(batch.prefix, after, value=-1),
        fed=pad(batch.fed, after),
        routing=None if routing is None else pad(routing, (0, 0, 0, 0, *after), value=UNKNOWN),
    )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend over whole rows, between two exchanges; see `AttentionInterface`.

    Queries are [R, heads, L / ranks, D], keys and values [R, key heads, L / ranks, ...].
    """
    share: SequenceShare | None = arguments.pop(_ARGUMENT, None)
    if share is None:
        raise UsageError(
            f"trainer.sequence_parallel: {type(module).__name__} does not pass the model's "
            "arguments on to attention: set it to 1"
        )
    share.layers += 1
    group, keys = share.group, key.shape[1]
    key_heads = math.lcm(keys, group.size)  # key heads, so that every rank has equally many
    if key_heads > keys:
        key, value = (x.repeat_interleave(key_heads // keys, 1) for x in (key, value))
    if arguments.get("s_aux") is not None:
        arguments["s_aux"] = arguments["s_aux"].chunk(group.size)[group.rank]
    if arguments.get("position_ids") is not None:
        arguments["position_ids"] = share.rows.position_ids
    heads = [_exchange(group, x) for x in (query, key, value)]
    output, _ = ALL_ATTENTION_FUNCTIONS[NAME](module, *heads, attention_mask, **arguments)
    return _exchange(group, output), None


def _mask_of(*_: Any, attention_mask: Any = None, **__: Any) -> Any:
    return attention_mask


def _exchange(group: SequenceGroup, tensor: Tensor) -> Tensor:
    """Exchange [R, heads, L / ranks, D] for [R, heads / ranks, L, D].

    And [R, L, heads / ranks, D], as attention returns it, for [R, L / ranks, heads, D].
    """
    parts = tensor.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
    received = all_to_all_single_autograd(parts, None, None, group.group)
    return received.movedim(0, 2).flatten(2, 3)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, share: SequenceShare) -> Tensor:
        ctx.learned = share.learned
        joined = values.new_zeros(len(share.rows.targets), *values.shape[1:])
        joined[share.learned] = values
        dist.all_reduce(joined, group=share.group.group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.learned], None


AttentionInterface.register(_SHARED, _attend)
AttentionMaskInterface.register(_SHARED, _mask_of)
