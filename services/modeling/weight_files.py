"""The weights of a model on the meta device, read from its files: the rows that are asked for.

A model's class may hold weights otherwise than its files do: experts as one stacked tensor, tied
weights once. Transformers has rules for that (`conversion_mapping`); here they are applied to the
rows of one tensor at a time, so nobody holds more than that besides the rows asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.modeling.model_directory import WEIGHT_FILES

SHOWN = 3  # names in an error


class NotByRowsError(UmbraError):
    """The files hold a model in a way that rows can't be read from; the text says which."""


@dataclass(slots=True)
class _Origin:
    """The source of a tensor: one tensor of the files, or the ones that `converter` takes."""

    keys: dict[str, list[str]] = field(default_factory=dict)  # in the files, by pattern
    converter: WeightConverter | None = None

    @property
    def key(self) -> str:
        return next(iter(self.keys))

    @property
    def by_experts(self) -> bool:
        """True if each row is made of one tensor of each pattern: experts, stacked."""
        operations = self.converter.operations if self.converter is not None else []
        if not operations or not isinstance(operations[0], MergeModulelist) or operations[0].dim:
            return False
        return all(isinstance(op, Concatenate) and op.dim > 0 for op in operations[1:])


class WeightFiles:
    """The files that tensors of `model`, which is on the meta device, are read from.

    Its buffers are there afterwards: stored ones are read, all others rebuilt. Parameters stay on
    the meta device until they are read. A model that has to be loaded whole is a NotByRowsError.
    """

    def __init__(self, directory: Path, model: PreTrainedModel, source: str = "model.path") -> None:
        self._directory = directory
        self._source = source
        self._config = model.config
        self._files = _files(directory)
        # Transformers' conversions find shapes by the names of this model, whatever becomes of it.
        self._model = model
        self._shapes = {name: list(t.shape) for name, t in model.state_dict().items()}
        conversions = get_model_conversion_mapping(model)
        origins = self._origins(conversions)
        # As `from_pretrained` does, so that exports get the names of before.
        used: Any = [conversion for conversion in conversions if conversion.was_used()]
        model._weight_conversions = used
        self._from: dict[str, _Origin] = {}
        for names in _aliases(model):
            given = [name for name in names if name in origins]
            if not given:
                raise UsageError(f"{source}: the files in {directory} have no {names[0]}")
            for other in given[1:]:
                self._check_tied(given[0], origins[given[0]], origins[other], other)
            self._from |= dict.fromkeys(names, origins[given[0]])
        self._make_buffers(model)

    @torch.no_grad()
    def read(self, name: str, place: Tensor, first: int = 0) -> None:
        """Copy rows `[first, first + len(place))` of parameter `name` to `place`, cast to it.

        Raises:
            UsageError: a file cannot be read, or is of another model.
        """
        try:
            if place.numel():
                self._read(name, place, first)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise self._fault(f"{name}: {error}") from error

    def _read(self, name: str, place: Tensor, first: int) -> None:
        origin = self._from[name]
        end = first + (len(place) if place.dim() else 0)
        with _OpenFiles(self._files) as files:
            if origin.converter is None:
                key = origin.key
                file = files.of(key)
                place.copy_(file.get_slice(key)[first:end] if place.dim() else file.get_tensor(key))
                return
            tensors: dict[str, list[Tensor]] = {}
            for pattern, keys in origin.keys.items():
                some = keys[first:end] if origin.by_experts else keys
                tensors[pattern] = [files.of(key).get_tensor(key) for key in some]
            made = self._convert(name, origin.converter, tensors)
            rows = made if origin.by_experts else made[first:end]
            if rows.shape != place.shape:
                there, wanted = list(made.shape), self._shapes[name]
                raise self._fault(f"{name} is {there}, config.json says {wanted}")
            place.copy_(rows)

    def _convert(
        self, name: str, converter: WeightConverter, tensors: Mapping[str, list[Any]]
    ) -> Tensor:
        own = deepcopy(converter)
        for pattern, some in tensors.items():
            for number, tensor in enumerate(some):
                own.add_tensor(name, f"{pattern}/{number}", pattern, tensor)
        made = own.convert(name, model=self._model, config=self._config)
        (found,) = made.values()
        return found[0] if isinstance(found, list) else found

    def _origins(self, conversions: list[Any]) -> dict[str, _Origin]:
        """Return the origin of each tensor of a state dict, as `from_pretrained` decides it."""
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        shapes: dict[str, Any] = dict(self._shapes)
        prefix = self._model.base_model_prefix
        found: dict[str, _Origin] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, shapes)
            if name not in shapes and key in shapes:
                name, pattern = rename_source_key(key, [], [], prefix, shapes)
            if name not in shapes:
                continue  # layers that the class leaves out, say
            if pattern is None:
                found[name] = _Origin({key: [key]})
                continue
            converter = by_pattern[pattern]
            simple = all(
                isinstance(op, MergeModulelist | Concatenate) for op in converter.operations
            )
            if len(converter.target_patterns) > 1 or not simple:
                raise NotByRowsError(f"{name} is made of {key} by {converter.operations}")
            origin = found.setdefault(name, _Origin({}, converter))
            origin.keys.setdefault(pattern, []).append(key)
        self._check_shapes(found)
        return found

    def _check_shapes(self, origins: Mapping[str, _Origin]) -> None:
        """Compare the shapes of tensors that are read as they are, and the number of experts."""
        faults: list[str] = []
        with _OpenFiles(self._files) as files:
            for name, origin in origins.items():
                wanted = self._shapes[name]
                if origin.converter is None:
                    there = files.of(origin.key).get_slice(origin.key).get_shape()
                    if list(there) != wanted:
                        faults.append(f"{name} is {list(there)}, config.json says {wanted}")
                elif origin.by_experts:
                    counts = {len(keys) for keys in origin.keys.values()}
                    if counts != {wanted[0]} or set(origin.keys) != {
                        *origin.converter.source_patterns
                    }:
                        faults.append(f"{name} has {counts} experts, {wanted[0]} by config.json")
        if faults:
            more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            shown = "; ".join(faults[:SHOWN])
            raise self._fault(f"its files are of another model: {shown}{more}")

    def _fault(self, what: str) -> UsageError:
        return UsageError(f"{self._source}: {self._directory} cannot be loaded: {what}")

    def _check_tied(self, name: str, origin: _Origin, other: _Origin, alias: str) -> None:
        """Leave to Transformers what the files have twice and unlike, which it unties."""
        with _OpenFiles(self._files) as files:
            mine, its = (files.of(one.key).get_slice(one.key) for one in (origin, other))
            rows = self._shapes[name][0]
            if any(not torch.equal(mine[at : at + 1], its[at : at + 1]) for at in range(rows)):
                raise NotByRowsError(f"{name} and {alias} are tied, but differ in the files")

    def _make_buffers(self, model: PreTrainedModel) -> None:
        """Read stored buffers, and compute all others as the class does."""
        stored = {name for name, _ in model.named_buffers()} & set(self._shapes)
        for name, buffer in list(model.named_buffers()):
            path, _, own = name.rpartition(".")
            made = torch.empty_like(buffer, device="cpu")
            setattr(model.get_submodule(path), own, made)
            if name in stored:
                self.read(name, made)
                made._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in model.parameters():
            parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        for module in model.modules():
            if "_is_hf_initialized" in vars(module):
                del module._is_hf_initialized
        model.initialize_weights()


class _OpenFiles(ExitStack):
    """Files that are opened once, and closed together; `paths` has the file of each tensor."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        super().__init__()
        self._paths = paths
        self._open: dict[Path, Any] = {}

    def of(self, key: str) -> Any:
        path = self._paths[key]
        if path not in self._open:
            self._open[path] = self.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


def _files(directory: Path) -> dict[str, Path]:
    whole, index = (directory / name for name in WEIGHT_FILES)
    if not whole.is_file():
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: directory / name for key, name in found.items()}
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)


def _aliases(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor of a state dict; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
