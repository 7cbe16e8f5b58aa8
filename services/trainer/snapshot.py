"""The policy's weights as bytes in an arena slot, in the dtype that is served; nothing is gathered.

Each rank casts the rows that it holds straight to their final place: FSDP2 shards parameters by
rows (`Shard(0)`; experts that ranks divide twice over), and rows lie one after the other in the
slot. What every rank holds whole (one rank, buffers) is divided by rows in the same way. Casting
goes piece by piece, so that a rank never holds more than its shard and one bucket. A layer with a
LoRA adapter goes out merged, one at a time; or a version is the factors of all adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from umbra.proto.records import Manifest
from umbra.services.modeling.gpu_copies import HashedCopies, gpu_copies, page_lock
from umbra.services.modeling.lora import BASE, LowRank, factors, is_adapter, low_rank
from umbra.services.modeling.weights import DTYPES
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.weights.verify import Copied

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 32 << 20  # of one message between ranks, unless a row has more
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what torch adds to names


def tensor_layout(
    model: nn.Module, dtype: str, *, adapter: bool = False
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, safetensors dtype and full shape of every tensor of a version, layer by layer.

    Names are as in Hugging Face's `state_dict`. Tied weights appear once, under their first name.
    Buffers that a checkpoint would hold are sent as they are, whatever `dtype` is; integer
    ones are counters of the training and stay here, and all others are computed from the model's
    configuration. With `adapter` it is the factors alone.
    """
    served = _NAMES[getattr(torch, dtype)]
    if adapter:
        return [(name, served, tuple(own.shape)) for name, own in factors(model).items()]
    return [
        (
            name,
            served if isinstance(tensor, LowRank | nn.Parameter) else _NAMES[tensor.dtype],
            tuple(tensor.shape),
        )
        for name, tensor in _tensors(model).items()
    ]


@torch.no_grad()
def write_shards(
    model: nn.Module,
    manifest: Manifest,
    slot: memoryview,
    rank: int = 0,
    world: int = 1,
    sums: Copied | None = None,
) -> int:
    """Cast what `rank` holds of `model` into `slot`; return the bytes written.

    The ranks together write every byte of every tensor exactly once; `slot` is the same memory in
    all ranks of a host. They wait for each other only where an adapter is merged; see `Snapshots`
    for what comes after. `sums` gets the bytes that this rank means to write.

    Raises:
        ValueError: a parameter is sharded other than by rows.
    """
    reshard(model)
    tensors = _tensors(model) if manifest.adapter is None else factors(model)
    piece = max(end - start for start, end in manifest.buckets)
    written = 0
    hashed = HashedCopies(sums) if sums is not None else None
    held = (*model.parameters(), *model.buffers())
    with gpu_copies(held, sums.until if sums is not None else None) as begun:
        for entry in manifest.tensors:
            source = tensors[entry.name]
            tensor = source.merged() if isinstance(source, LowRank) else source
            own, first = own_rows(entry.name, tensor, rank, world)
            if own.numel() == 0:
                continue
            dtype = DTYPES[entry.dtype]
            row = entry.nbytes // entry.shape[0] if entry.shape else entry.nbytes
            begin = entry.offset + first * row
            area = slot[begin : begin + own.numel() * dtype.itemsize]
            target = torch.frombuffer(area, dtype=dtype).view(own.shape)
            if own.is_cuda:
                page_lock(slot)
            if hashed is not None and not own.is_cuda:
                hashed.copy(target, own, dtype, begin)
            else:
                _cast(target, own, piece)
            if own.is_cuda:
                begun(len(area), begin + len(area))
            written += len(area)
    return written


def whole_weights(
    model: nn.Module,
    ranks: Ranks | None = None,
    of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole, float32 and on the CPU, by name; on rank 0.

    Where parameters are sharded every rank has to call it, and sends what it holds, one tensor
    after the other. `of` gives what to take for a parameter.
    """
    whole: dict[str, Tensor] = {}
    ranks = ranks or Ranks()
    for name, source in _tensors(model, of).items():
        tensor = source.merged() if isinstance(source, LowRank) else source.detach()
        if isinstance(tensor, DTensor):
            tensor = _gathered(name, tensor, ranks)
        if ranks.rank == 0:
            bf16 = isinstance(source, LowRank | nn.Parameter) and tensor.dtype == torch.bfloat16
            whole[name] = tensor.cpu().float() if bf16 else tensor.cpu()
    return whole


def _gathered(name: str, tensor: DTensor, ranks: Ranks) -> Tensor:
    """Return the whole of a sharded tensor on rank 0, in host memory; nothing on the others.

    Rows go in messages of a bounded size, as the ranks may be on several hosts.
    """
    own, first = own_rows(name, tensor, ranks.rank, ranks.world)
    parts: list[list[int]] = ranks.gather_ranks(torch.tensor([first, len(own)])).tolist()
    if ranks.rank:
        for some in _pieces(own):
            dist.send(as_bytes(some.contiguous().cpu()), 0)
        return own[:0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    whole[first : first + len(own)].copy_(own)
    for rank, (begin, count) in enumerate(parts):
        for some in _pieces(whole[begin : begin + count]) if rank else ():
            dist.recv(as_bytes(some), rank)
    return whole


def _pieces(rows: Tensor) -> Iterator[Tensor]:
    step = max(1, PIECE_BYTES * len(rows) // max(1, rows.nbytes))
    return (rows[at : at + step] for at in range(0, len(rows) if rows.numel() else 0, step))


def as_bytes(rows: Tensor) -> Tensor:
    """Return the same memory as bytes, for messages: not every backend sends every type."""
    return rows.view(-1).view(torch.uint8)


def _tensors(
    model: nn.Module, of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter
) -> dict[str, Tensor | LowRank]:
    """Return the parameters, and the buffers that belong to a checkpoint, by name."""
    stored = model.state_dict(keep_vars=True)
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in stored and buffer.dtype in _NAMES and buffer.numel()
    }
    merged = low_rank(model, of)
    parameters = ((name, of(parameter)) for name, parameter in model.named_parameters())
    tensors: dict[str, Tensor | LowRank] = {}
    for name, tensor in (*parameters, *buffers.items()):
        if not is_adapter(name):
            bare = bare_name(name)
            tensors[bare] = merged.get(bare, tensor)
    return tensors


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
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if tensor.dim() == 0:
        return (tensor, 0) if rank == 0 else (tensor.new_empty(0), 0)
    start, end = chunk(tensor.shape[0], rank, world)
    return tensor[start:end], start


def written_rows(
    model: nn.Module, rank: int, world: int, *, adapter: bool = False
) -> dict[str, tuple[int, int]]:
    """Return the rows `[first, end)` of each tensor of a version that `rank` writes, if any."""
    rows: dict[str, tuple[int, int]] = {}
    for name, source in (factors(model) if adapter else _tensors(model)).items():
        tensor = source.base if isinstance(source, LowRank) else source
        own, first = own_rows(name, tensor, rank, world)
        if own.numel():
            rows[name] = first, first + (len(own) if own.dim() else 1)
    return rows


def held_rows(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """Return the local rows of `tensor` and the first's number; ValueError if cut otherwise."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = [dim for dim in range(mesh.ndim) if not isinstance(placements[dim], Replicate)]
    kinds = [placements[dim] for dim in sharded]
    if _is_divided_twice(kinds):
        sharded.reverse()
    elif len(sharded) > 1 or any(kind != Shard(0) for kind in kinds):
        raise ValueError(f"{name} is placed as {placements}: only Shard(0) can be written by rows")
    own = tensor.to_local()
    start, end = 0, tensor.shape[0] if tensor.dim() else 0
    for dim in sharded:
        first, last = chunk(end - start, mesh.get_local_rank(dim), mesh.size(dim))
        start, end = start + first, start + last
    return (own[: end - start], start) if sharded else (own, 0)


def _is_divided_twice(placements: list[Placement]) -> bool:
    """Return whether rows are divided over the last dimension of a mesh, and then over the first.

    Experts are; FSDP calls it strided, as neighbouring ranks have rows that are not neighbours.
    """
    if len(placements) != 2:
        return False
    first, last = placements
    return isinstance(first, _StridedShard) and first.dim == 0 and last == Shard(0)


def chunk(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rows `[start, end)` that `rank` of `world` holds, as `torch.chunk` divides them.

    All chunks but the last ones have the same size; those may be smaller, or empty.
    """
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def _cast(target: Tensor, source: Tensor, piece_bytes: int) -> None:
    """Copy `source` to `target` (same shape) in pieces of at most `piece_bytes` of either dtype.

    A GPU casts a piece by itself, where torch's `copy_` would move it uncast to the host first, and
    copies out of it are only begun; see `gpu_copies`.
    """
    row = max(source.nbytes, target.nbytes) // max(1, len(source)) if source.dim() else 0
    if row > piece_bytes:
        for one_target, one_source in zip(target, source, strict=True):
            _cast(one_target, one_source, piece_bytes)
        return
    if source.dim() == 0:
        target, source, row = target[None], source[None], 1
    step = max(1, piece_bytes // max(1, row))
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        if piece.is_cuda:
            piece = piece.to(target.dtype)
        target[start : start + step].copy_(piece, non_blocking=True)
