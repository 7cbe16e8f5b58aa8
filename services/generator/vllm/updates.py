"""A version on its way into vLLM: names of its tensors, its place in memory, salts of its prefixes.

Transformers fuses the experts of a layer when it loads a checkpoint, and the trainer publishes what
it trains: `mlp.experts.gate_up_proj` [experts, 2 x ff, hidden] where the checkpoint has
`mlp.experts.0.gate_proj.weight` and so on, or another architecture's names. Every tensor of the
checkpoint is a part of one such tensor, row after row, so only names and offsets change: no byte
is copied.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from umbra.proto.errors import UsageError
from umbra.proto.records import AdapterFacts, Manifest, TensorEntry
from umbra.services.modeling.weights import WeightTable
from umbra.services.weights.manifest import Part
from umbra.services.weights.memory import copy, locate, shared_memory

# A tensor of a checkpoint: its name, at which element of the model's tensor it begins, its shape.
_TensorPart = tuple[str, int, tuple[int, ...]]


class CheckpointNames:
    """Names of the tensors of `model`, which may be without weights, in its checkpoints.

    Raises:
        UsageError: a checkpoint has them in another layout.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._parts = {
            name: _parts(model, name, tuple(tensor.shape))
            for name, tensor in model.state_dict().items()
        }
        names = [name for parts in self._parts.values() for name, _, _ in parts]
        if len(set(names)) != len(names):  # one of a checkpoint is made of several of the model
            raise _another_layout(model, next(name for name in names if names.count(name) > 1))

    def of(self, entry: TensorEntry) -> list[TensorEntry]:
        """Return `entry`, a whole tensor of the model, as tensors of a checkpoint."""
        item = entry.nbytes // max(1, prod(entry.shape))
        return [
            replace(
                entry,
                name=name,
                shape=list(shape),
                offset=entry.offset + first * item,
                nbytes=prod(shape) * item,
            )
            for name, first, shape in self._parts[entry.name]
        ]


def _parts(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> list[_TensorPart]:
    """Return where Transformers puts the tensor `name` when it writes a checkpoint.

    It converts a tensor that holds numbers of places instead of weights, the first two of each row.
    """
    width = shape[-1] if shape else 1
    columns = min(width, 2)
    numbers = torch.arange(prod(shape[:-1]) * columns).view(*shape[:-1], *[columns] * bool(shape))
    try:
        converted = revert_weight_conversion(model, {name: numbers})
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise _another_layout(model, name) from error
    parts: list[_TensorPart] = []
    count = 0
    for target, part in sorted(converted.items(), key=lambda pair: int(pair[1].flatten()[0])):
        ascending = torch.arange(count, count + part.numel()).view(part.shape)
        if not torch.equal(part, ascending) or tuple(part.shape[-1:]) != numbers.shape[-1:]:
            raise _another_layout(model, name)
        parts.append((target, count // columns * width, (*part.shape[:-1], *shape[-1:])))
        count += part.numel()
    if count != numbers.numel():
        raise _another_layout(model, name)
    return parts


def _another_layout(model: PreTrainedModel, name: str) -> UsageError:
    return UsageError(
        f'generator.engine = "vllm": checkpoints of {type(model).__name__} have {name} in another '
        'layout than the trainer publishes it in: set generator.engine = "torch"'
    )


class Update(NamedTuple):
    """A version on its way: the fields of `UpdateInfo`, and the bytes that they name."""

    info: dict[str, Any]
    start: int  # of these bytes in the file that workers map
    memory: Part
    is_copy: bool  # nobody else keeps the memory


class Updates:
    """A maker of updates for versions of `outline`, a model without weights, or its adapter."""

    def __init__(self, outline: Any, adapter: AdapterFacts | None = None) -> None:
        self._fit = WeightTable(outline, adapter)
        self._checkpoint = CheckpointNames(outline) if adapter is None else None

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError unless versions of this layout fit the model."""
        self._fit.check(manifest)

    def of(self, manifest: Manifest, data: Part, *, is_mapped: bool = False) -> Update:
        """Return the update that loads `data`, from the GPU where workers have mapped it.

        Data that is neither there nor in shared memory is copied to shared memory.
        """
        place = ("", 0) if is_mapped else locate(data) if isinstance(data, memoryview) else None
        if is_copy := place is None:
            whole = shared_memory(len(data))
            copy(data if isinstance(data, memoryview) else bytes(data), whole)
            data, place = whole, locate(whole)
            assert place is not None
        path, start = place  # "": memory of the GPU
        layout = msgspec.json.encode(self._layout(manifest, start)).decode()
        info = {"path": path, "manifest": layout, "buckets": []}
        return Update(info, start, data, is_copy)

    def _layout(self, manifest: Manifest, start: int) -> Manifest:
        """Return the layout of a version from byte `start` on, in the names of checkpoints."""
        # A version has tied tensors once, but vLLM packs them for each layer.
        names = {entry.name for entry in manifest.tensors}
        tied = self._fit.left_out(names) if self._checkpoint is not None else {}
        tensors: list[TensorEntry] = []
        for entry in manifest.tensors:
            for name in (entry.name, *tied.get(entry.name, ())):
                moved = replace(entry, name=name, offset=entry.offset + start)
                tensors += self._checkpoint.of(moved) if self._checkpoint is not None else [moved]
        return replace(manifest, tensors=tensors)


class Salts:
    """Requests that begin between two loads share a salt, later turns of older sessions do not.

    A session whose last turn began under the weights of now goes on under the salt that all share,
    one of whom older weights made a part gets a salt of its own from then on. So a group reads its
    prompt once, a session reads itself again at one load and never after it, and nobody reads the
    KV that older weights computed for another session.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._own = "own."  # begins a salt that one session has alone
        self.shared = ""
        self._last: dict[str, str] = {}  # by session, the salt of its last turn

    def loaded(self, version: int, *, keep: bool) -> None:
        """Note that `version` is served from now on; without `keep` no earlier KV is valid.

        A trainer that goes back gives a number to other weights, so the version alone is no name.
        """
        self.shared = f"{version}.{next(self._numbers)}"
        if not keep:
            self._own = f"own{self.shared}."
            self._last.clear()

    def of(self, session: str) -> str:
        """Return the salt of the next request of `session`; "" = of no session."""
        last = self._last.get(session, self.shared)
        if last != self.shared and not last.startswith(self._own):
            last = self._last[session] = f"{self._own}{next(self._numbers)}"
        return last

    def used(self, session: str, salt: str) -> None:
        if session:
            self._last[session] = salt

    def forget(self, session: str) -> None:
        self._last.pop(session, None)
