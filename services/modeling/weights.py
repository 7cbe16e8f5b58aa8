"""Weights from bytes into a live model: all of a version, or nothing of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from umbra.proto.errors import PeerLostError, UsageError
from umbra.proto.records import AdapterFacts, Manifest, TensorEntry
from umbra.services.config import RunConfig
from umbra.services.modeling.gpu_copies import fill, gpu_copies, page_lock
from umbra.services.modeling.lora import adapter_facts, add_adapter, factors
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.weights.gpu.cuda import DeviceMemory
from umbra.services.weights.manifest import Part

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def tensors_in(manifest: Manifest, data: Part) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version as views of `data`: writable memory, or memory on a GPU."""
    if isinstance(data, DeviceMemory):
        content = torch.as_tensor(data, device=f"cuda:{data.device.index}")
    else:
        content = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0)
    for entry in manifest.tensors:
        flat = content[entry.offset : entry.offset + entry.nbytes].view(_dtype(entry))
        yield entry.name, flat.view(entry.shape)


def _dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype in DTYPES:
        return DTYPES[entry.dtype]
    known = ", ".join(DTYPES)
    raise UsageError(f"tensor {entry.name} has dtype {entry.dtype}; known: {known}")


class WeightTable:
    """The places of a model that a version fills, by their state-dict names.

    Tied weights have several names and one place; a version may give any or all of those names.
    Buffers are optional, parameters are not. A version of an `adapter` fills its factors alone.
    """

    def __init__(self, model: nn.Module, adapter: AdapterFacts | None = None) -> None:
        self._adapter = adapter
        self._places = model.state_dict(keep_vars=True) if adapter is None else factors(model)
        self._aliases: dict[int, list[str]] = {}
        for name, place in self._places.items():
            if isinstance(place, nn.Parameter):
                self._aliases.setdefault(id(place), []).append(name)

    @torch.no_grad()
    def load(self, manifest: Manifest, data: Part) -> None:
        """Copy a version in place; if it does not fit, nothing was changed."""
        self.check(manifest)
        if len(data) != manifest.total_bytes:
            raise PeerLostError(f"got {len(data)} of the {manifest.total_bytes} bytes of a version")
        places = [self._places[entry.name].detach() for entry in manifest.tensors]
        with gpu_copies(places):
            for place, (_, tensor) in zip(places, tensors_in(manifest, data), strict=True):
                if place.is_cuda:
                    page_lock(data)
                fill(place, tensor)

    def left_out(self, names_present: Collection[str]) -> dict[str, list[str]]:
        """Return names not in `names_present`, by the name in it whose place they share."""
        missing: dict[str, list[str]] = {}
        for names in self._aliases.values():
            present = [name for name in names if name in names_present]
            if 0 < len(present) < len(names):
                missing[present[0]] = [name for name in names if name not in present]
        return missing

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError unless versions of this layout fit."""
        for entry in manifest.tensors:
            _dtype(entry)
        _check_adapter(manifest.adapter, self._adapter)
        shapes = {entry.name: list(entry.shape) for entry in manifest.tensors}
        own = {name: list(place.shape) for name, place in self._places.items()}
        missing = [names[0] for names in self._aliases.values() if shapes.keys().isdisjoint(names)]
        unknown = [name for name in shapes if name not in own]
        wrong = [
            f"{name} {shape} instead of {own[name]}"
            for name, shape in shapes.items()
            if shape != own.get(name, shape)
        ]
        faults = [
            f"{kind}: {first_names(names)}"
            for kind, names in (("missing", missing), ("unknown", unknown), ("shape", wrong))
            if names
        ]
        if faults:
            keys = "model.path" if self._adapter is None else "model.path and trainer.lora_targets"
            raise UsageError(
                f"the weights do not fit this generator's model ({'; '.join(faults)}); trainer and "
                f"generators must be given the same {keys}"
            )


def weight_table(model: Any, config: RunConfig) -> WeightTable:
    """Return the places of a run's versions in `model`, which is `model.path`, on its device.

    If versions are an adapter, `model` gets it here, and the forward pass is the trainer's
    own: base and factors are multiplied one after the other and never merged, so small factors
    are not rounded away.
    """
    device, dtype = model.device, model.dtype
    if (adapter := put_adapter(model, config)) is not None:
        for factor in factors(model).values():
            factor.data = factor.data.to(device, dtype)  # peft has them in float32
    return WeightTable(model, adapter)


def put_adapter(model: Any, config: RunConfig) -> AdapterFacts | None:
    """Put the adapter that versions fill into `model`; None if they are whole weights."""
    if config.trainer.lora_publish == "merged":
        return None
    add_adapter(model, config.trainer, config.run.seed)
    return adapter_facts(config.trainer, weights_checksum(config.model.path))


def _check_adapter(adapter: AdapterFacts | None, own: AdapterFacts | None) -> None:
    """Raise UsageError unless versions are of this process's adapter; shapes may not show it."""
    if adapter == own:
        return
    if adapter is None or own is None:
        trainer, local = ("merged", "adapter") if adapter is None else ("adapter", "merged")
        raise UsageError(
            f"the trainer has trainer.lora_publish = {trainer} and this process {local}: give both "
            "the same run file"
        )
    if adapter.base != own.base:
        raise UsageError(
            "the trainer's adapter is for another base model than that in model.path of this "
            f"process (checksums {adapter.base} and {own.base}): give both the same directory"
        )
    raise UsageError(
        f"the trainer's adapter has trainer.lora_rank = {adapter.rank} and lora_alpha = "
        f"{adapter.alpha:g}, that of this process {own.rank} and {own.alpha:g}: give both the same "
        "run file"
    )


def first_names(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    shown, rest = names[:3], names[3:]
    return ", ".join(shown) + (f" and {len(rest)} more" if rest else "")
