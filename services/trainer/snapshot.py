"""The policy's weights as bytes in an arena slot, in the dtype that is served; nothing is gathered.

Each rank casts the rows that it holds straight to their final place: FSDP2 shards parameters by
rows (`Shard(0)`; experts that ranks divide twice over), and rows lie one after the other in the
slot. What every rank holds whole (one rank, buffers) is divided by rows in the same way. A layer
with a LoRA adapter goes out merged, one at a time; or a version is the factors of all adapters.

Rank 0 says which slot of the arena it is, and all write their rows. When all have, each computes
the checksums of an equal share of its host's buckets, and compares them, piece by piece, with the
checksums of the data that the ranks meant to write. On several hosts each has an arena of its own
under the same path, with the rows of its ranks. No bucket holds rows of two hosts.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from umbra.proto.records import Manifest
from umbra.services.modeling.gpu_copies import bytes_of, fill, gpu_copies, page_lock
from umbra.services.modeling.lora import BASE, LowRank, factors, is_adapter, low_rank
from umbra.services.modeling.sharded import held_rows, local, whole
from umbra.services.modeling.weights import DTYPES
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets
from umbra.services.weights.verify import BLOCK_BYTES, THREADS, Checksums, Move, Piece

log = logging.getLogger(__name__)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what torch adds to names


def tensor_layout(
    model: nn.Module, dtype: str, *, adapter: bool = False
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, safetensors dtype and full shape of every tensor of a version, layer by layer.

    Names are as in Hugging Face's `state_dict`. Tied weights appear once, under their first name.
    Buffers of a checkpoint keep their own dtype. Left out are integer ones, which count training
    steps, and those that the model computes from its configuration. With `adapter` only the
    factors are listed.
    """
    served = _NAMES[getattr(torch, dtype)]
    return [
        (
            name,
            served if isinstance(tensor, LowRank | nn.Parameter) else _NAMES[tensor.dtype],
            tuple(tensor.shape),
        )
        for name, tensor in _tensors(model, adapter=adapter).items()
    ]


@torch.no_grad()
def write_shards(
    model: nn.Module,
    manifest: Manifest,
    slot: memoryview,
    rank: int = 0,
    world: int = 1,
    sums: Checksums | None = None,
) -> int:
    """Cast what `rank` holds of `model` into `slot`; return the bytes written.

    The ranks together write every byte of every tensor exactly once; `slot` is the same memory in
    all ranks of a host. They wait for each other only where an adapter is merged; see `Snapshots`
    for what comes after. `sums` gets the bytes that this rank means to write.

    Raises:
        ValueError: a parameter is sharded other than by rows.
    """
    reshard(model)
    tensors = _tensors(model, adapter=manifest.adapter is not None)
    piece = max(end - start for start, end in manifest.buckets)
    written = 0
    tensors_held = (*model.parameters(), *model.buffers())
    with gpu_copies(tensors_held, sums.until if sums is not None else None) as begun:
        for entry in manifest.tensors:
            source = tensors[entry.name]
            tensor = source.merged() if isinstance(source, LowRank) else source
            rows, first = own_rows(entry.name, tensor, rank, world)
            if rows.numel() == 0:
                continue
            dtype = DTYPES[entry.dtype]
            begin = entry.offset + first * (entry.nbytes // entry.shape[0] if entry.shape else 0)
            area = slot[begin : begin + rows.numel() * dtype.itemsize]
            target = torch.frombuffer(area, dtype=dtype).view(rows.shape)
            if rows.is_cuda:
                page_lock(slot)
                _cast(target, rows, piece)
                begun(len(area), begin + len(area))
            elif sums is not None:
                sums.copy(begin, begin + len(area), _by_block(target, rows))
            else:
                _cast(target, rows, piece)
            written += len(area)
    if sums is not None:
        sums.pieces()
    return written


def whole_weights(
    model: nn.Module,
    ranks: Ranks | None = None,
    of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole, float32 and on the CPU, by name; on rank 0.

    Where parameters are sharded every rank has to call it, and holds one tensor whole after the
    other. `of` gives what to take for a parameter.
    """
    weights: dict[str, Tensor] = {}
    for name, source in _tensors(model, of).items():
        tensor = whole(source.merged() if isinstance(source, LowRank) else source.detach())
        if ranks is None or ranks.rank == 0:
            bf16 = isinstance(source, LowRank | nn.Parameter) and tensor.dtype == torch.bfloat16
            weights[name] = tensor.cpu().float() if bf16 else tensor.cpu()
    return weights


def _tensors(
    model: nn.Module,
    of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
    *,
    adapter: bool = False,
) -> Mapping[str, Tensor | LowRank]:
    """Return parameters and the buffers of a checkpoint by name; of an `adapter` its factors."""
    if adapter:
        return factors(model)
    stored, merged = model.state_dict(keep_vars=True), low_rank(model, of)
    parameters = {bare_name(n): of(p) for n, p in model.named_parameters() if not is_adapter(n)}
    buffers = {
        bare_name(name): buffer
        for name, buffer in model.named_buffers()
        if name in stored and buffer.dtype in _NAMES and buffer.numel()
    }
    tensors: dict[str, Tensor | LowRank] = {**parameters, **buffers}
    return {name: merged.get(name, tensor) for name, tensor in tensors.items()}


def bare_name(name: str) -> str:
    """Return a tensor's name in the files of a model, whatever is wrapped around its layer."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.replace(BASE, "")


def own_rows(name: str, tensor: Tensor, rank: int, world: int) -> tuple[Tensor, int]:
    """Return the rows of `tensor` that this rank writes, and the number of the first one.

    Of a tensor that is not sharded each of `world` ranks writes its chunk.

    Raises:
        ValueError: it is sharded other than by rows.
    """
    if isinstance(tensor, DTensor) and any(p.is_shard() for p in tensor.placements):
        return held_rows(name, tensor)
    tensor = local(tensor)
    if tensor.dim() == 0:
        return (tensor, 0) if rank == 0 else (tensor.new_empty(0), 0)
    rows, start = Shard.local_shard_size_and_offset(len(tensor), world, rank)
    return tensor[start : start + rows], start


def _by_block(target: Tensor, source: Tensor) -> Move:
    """Return a copy from `source` to `target`, in its dtype, by way of a private block.

    So the checksums are of the bytes meant to be written, whoever changes that memory.
    """
    read, written, size = source.reshape(-1), target.view(-1), target.itemsize

    def move(start: int, end: int) -> memoryview:
        first, last = start // size, end // size
        if not hasattr(_blocks, "own"):  # a block for each thread, which stays in its cache
            _blocks.own = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        part = _blocks.own.view(target.dtype)[: last - first]
        fill(part, read[first:last])
        fill(written[first:last], part)
        return bytes_of(part)

    return move


_blocks = threading.local()


def _cast(target: Tensor, source: Tensor, piece_bytes: int) -> None:
    """Copy `source` to `target` (same shape) in pieces of at most `piece_bytes` of either dtype.

    A GPU casts a piece by itself, where torch's `copy_` would move it uncast to the host first, and
    copies out of it are only begun; see `gpu_copies`.
    """
    if source.dim() == 0:
        target, source = target[None], source[None]
    row = max(source.nbytes, target.nbytes) // len(source)
    if row > piece_bytes and source.dim() > 1:
        for one_target, one_source in zip(target, source, strict=True):
            _cast(one_target, one_source, piece_bytes)
        return
    step = max(1, piece_bytes // max(1, row))
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        if piece.is_cuda:
            piece = piece.to(target.dtype)
        target[start : start + step].copy_(piece, non_blocking=True)


def own_buckets(manifest: Manifest, place: RankPlace) -> list[int]:
    """Return the buckets whose checksums a rank computes: its share of its host's buckets."""
    owned = owned_buckets(manifest).get(place.node(place.rank), [])
    number, count = place.rank % place.per_host, place.per_host
    return owned[number * len(owned) // count : (number + 1) * len(owned) // count]


def row_owners(
    model: nn.Module, ranks: Ranks, *, adapter: bool = False
) -> dict[str, list[tuple[int, int]]]:
    """Return the host that writes each range of rows, for `build_manifest`; nothing on one host.

    By name `(end, node)`, with ends that ascend up to the number of rows. All ranks call it.
    """
    if ranks.place.nodes == 1:
        return {}
    written: dict[str, tuple[int, int]] = {}  # rows [first, end) of each tensor, if any
    for name, source in _tensors(model, adapter=adapter).items():
        tensor = source.base if isinstance(source, LowRank) else source
        rows, first = own_rows(name, tensor, ranks.rank, ranks.world)
        if rows.numel():
            written[name] = first, first + (len(rows) if rows.dim() else 1)
    return owners_of(ranks.collect(written, dict[str, tuple[int, int]]), ranks.place)


def owners_of(
    written: Sequence[Mapping[str, tuple[int, int]]], place: RankPlace
) -> dict[str, list[tuple[int, int]]]:
    """Return the same as `row_owners`, given the rows that each rank writes."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for rank, rows in enumerate(written):
        for name, (first, end) in rows.items():
            parts.setdefault(name, []).append((first, end, place.node(rank)))
    # The last of neighbouring ranges of a host has the end of them all.
    return {
        name: [list(own)[-1][1:] for _, own in groupby(sorted(ranges), key=itemgetter(2))]
        for name, ranges in parts.items()
    }


def checked(slot: memoryview, start: int, end: int, pieces: Sequence[Piece]) -> int:
    """Return the checksum of bucket `[start, end)`; an invalid one if a piece has changed.

    `pieces` are of all its writers, in order; receivers refuse an invalid checksum.
    """
    data = memoryview(bytes(slot[start:end]))
    parts = pieces[bisect_left(pieces, (start,)) : bisect_left(pieces, (end,))]
    if changed := [
        a for a, stop, total in parts if checksum(data[a - start : stop - start]) != total
    ]:
        log.error("another process changed a version in shared memory, at byte %d", changed[0])
    return checksum(data) ^ bool(changed)


class Snapshots:
    """A writer of versions of `model`, on every rank of `ranks` its own rows."""

    def __init__(self, model: nn.Module, manifest: Manifest, ranks: Ranks) -> None:
        self._model, self._manifest, self._ranks = model, manifest, ranks
        self._arena: tuple[str, Arena] | None = None  # rank 0 has one of its own

    def write(self, place: tuple[str, int], slot: memoryview | None = None) -> list[int]:
        """Write the current weights; return the checksum of every bucket.

        `place` is the slot's: the path of the arena, and its number. Rank 0 has its memory.
        """
        ranks, manifest = self._ranks, self._manifest
        path, number = place
        if slot is None:
            if self._arena is None or self._arena[0] != path:
                self.close()
                self._arena = path, Arena.attach(path, slot_bytes=manifest.total_bytes)
            self._arena[1].lock(number)
            slot = self._arena[1].slot(number)
        threads = max(1, THREADS // ranks.place.per_host)
        if torch.get_num_threads() > 1 and all(p.is_cpu for p in self._model.parameters()):
            threads = 1  # torch divides each copy among its own
        expected = Checksums(manifest, slot, threads, is_whole=ranks.world == 1)
        write_shards(self._model, manifest, slot, ranks.rank, ranks.world, expected)
        if self._arena is not None:
            self._arena[1].unlock(number)
        if ranks.world == 1:
            return expected.result()
        # When all have told theirs, all have written.
        pieces_by_rank = ranks.collect(expected.pieces(), list[Piece])
        pieces = sorted(piece for pieces_of_rank in pieces_by_rank for piece in pieces_of_rank)
        sums = np.zeros(len(manifest.buckets), np.uint64)
        for bucket in own_buckets(manifest, ranks.place):
            start, end = manifest.buckets[bucket]
            sums[bucket] = checked(slot, start, end, pieces)
        ranks.sum_ranks(torch.from_numpy(sums.view(np.int64)))
        return sums.tolist()

    def close(self) -> None:
        if self._arena is not None:
            self._arena[1].close()
            self._arena = None
