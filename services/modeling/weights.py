"""Weights from bytes into a live model: all of a version, or nothing of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest, TensorEntry
from umbra.services.runtime.gpu.cuda import DeviceMemory

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES_SHOWN = 3


def tensors_in(
    manifest: Manifest, data: memoryview | DeviceMemory
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one version, as views of `data`: writable memory, or memory on a GPU.

    Raises:
        UsageError: a dtype that the engine does not know.
    """
    if isinstance(data, DeviceMemory):
        whole = torch.as_tensor(data, device=f"cuda:{data.device.index}")
    else:
        whole = torch.frombuffer(data, dtype=torch.uint8)
    for entry in manifest.tensors:
        flat = whole[entry.offset : entry.offset + entry.nbytes].view(_dtype(entry))
        yield entry.name, flat.view(entry.shape)


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UsageError(
            f"tensor {entry.name} has dtype {entry.dtype}; known: {', '.join(_DTYPES)}"
        )
    return dtype


def pieces_in(
    manifest: Manifest, buckets: Iterable[tuple[int, memoryview]]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, first element and elements (flat) of what each bucket holds of each tensor.

    Args:
        manifest: the layout; buckets are cut between elements.
        buckets: start and bytes of each, in order; writable, good until the next is asked for.
    """
    entries = iter(manifest.tensors)
    entry = next(entries, None)
    for start, data in buckets:
        end = start + len(data)
        while entry is not None and entry.offset < end:
            dtype = _DTYPES[entry.dtype]
            first, last = max(start, entry.offset), min(end, entry.offset + entry.nbytes)
            if first < last:
                count = (last - first) // dtype.itemsize
                piece = torch.frombuffer(data, dtype=dtype, count=count, offset=first - start)
                yield entry.name, (first - entry.offset) // dtype.itemsize, piece
            if entry.offset + entry.nbytes > end:
                break  # the rest is in the next bucket
            entry = next(entries, None)


class WeightTable:
    """The places of a model that a version fills, by their state-dict names.

    Tied weights have several names and one place; a version may give any or all of those names.
    Buffers are optional, parameters are not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = model.state_dict(keep_vars=True)
        self._aliases: dict[int, list[str]] = {}
        for name, place in self._places.items():
            if isinstance(place, nn.Parameter):
                self._aliases.setdefault(id(place), []).append(name)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `tensors` in place.

        Raises:
            UsageError: a name is missing or unknown, or a shape differs; nothing was changed then.
        """
        given = dict(tensors)
        self.check(given)
        for name, tensor in given.items():
            self._places[name].copy_(tensor)
        # Copies inside of a GPU are only begun by then, and the memory of `tensors` is used again.
        for device in {tensor.device for tensor in given.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def load_buckets(self, manifest: Manifest, buckets: Iterable[tuple[int, memoryview]]) -> None:
        """Copy a version in place bucket by bucket; see `pieces_in`.

        Raises:
            UsageError: as `load`; nothing was changed then.
            UmbraError: `buckets` broke off; the weights are part old, part new then.
        """
        self.check_manifest(manifest)
        for name, first, piece in pieces_in(manifest, buckets):
            flat = self._places[name].detach().view(-1)
            flat[first : first + len(piece)].copy_(piece)

    def check_manifest(self, manifest: Manifest) -> None:
        """Check that versions of this layout fit.

        Raises:
            UsageError: as `load`.
        """
        self.check(
            {
                entry.name: torch.empty(entry.shape, dtype=_dtype(entry), device="meta")
                for entry in manifest.tensors
            }
        )

    def left_out(self, given: Collection[str]) -> dict[str, list[str]]:
        """Names that are not in `given`, by the name in `given` whose place they share."""
        found: dict[str, list[str]] = {}
        for names in self._aliases.values():
            there = [name for name in names if name in given]
            if 0 < len(there) < len(names):
                found[there[0]] = [name for name in names if name not in given]
        return found

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        """Check that `given` is a version of this model.

        Raises:
            UsageError: as `load`.
        """
        missing = [
            names[0] for names in self._aliases.values() if not any(n in given for n in names)
        ]
        unknown = [name for name in given if name not in self._places]
        wrong = [
            f"{name} {list(tensor.shape)} instead of {list(self._places[name].shape)}"
            for name, tensor in given.items()
            if name in self._places and tensor.shape != self._places[name].shape
        ]
        faults = [
            f"{what}: {_some(names)}"
            for what, names in (("missing", missing), ("unknown", unknown), ("shape", wrong))
            if names
        ]
        if faults:
            raise UsageError(
                f"the weights do not fit this generator's model ({'; '.join(faults)}); trainer and "
                "generators must be given the same model.path"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
