"""Tensors of which this rank may hold some rows (DTensors), or all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all rows; where they are sharded every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held_rows(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """Return the local rows of `tensor` and the first's number; ValueError if cut otherwise."""
    own = local(tensor)
    if not isinstance(tensor, DTensor) or not tensor.dim():
        return own, 0
    shape, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if shape[1:] != tensor.shape[1:]:
        raise ValueError(f"{name} is placed as {tensor.placements}: only rows can be written")
    return own, first[0] if shape[0] else 0


def sharded_like(tensor: Tensor, held: Tensor, shape: Iterable[int]) -> Tensor:
    """Wrap `held`, this rank's rows of a tensor of `shape` that is sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return held
    size = torch.Size(shape)
    made = DTensor.from_local(
        held,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=size,
        stride=torch.empty(size, device="meta").stride(),
    )
    return made.to(held.device)  # from_local moves it to the mesh's device


def rows_like(tensor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return zeros [rows of `tensor`, ...], sharded by rows as it is, on its device."""
    own, size = local(tensor), torch.Size(shape)
    rows = [len(own), *size[1:]] if isinstance(tensor, DTensor) else size
    return sharded_like(tensor, torch.zeros(rows, dtype=dtype, device=own.device), size)
