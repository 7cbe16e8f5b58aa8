"""Weights from bytes into a live model: all of a version, or nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES_SHOWN = 3


def tensors_in(manifest: Manifest, data: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one version, as views of `data`, which must be writable memory.

    Raises:
        UsageError: a dtype that the engine does not know.
    """
    for entry in manifest.tensors:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UsageError(
                f"tensor {entry.name} has dtype {entry.dtype}; known: {', '.join(_DTYPES)}"
            )
        count = entry.nbytes // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.offset)
        yield entry.name, flat.view(entry.shape)


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
        self._check(given)
        for name, tensor in given.items():
            self._places[name].copy_(tensor)

    def _check(self, given: dict[str, torch.Tensor]) -> None:
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
