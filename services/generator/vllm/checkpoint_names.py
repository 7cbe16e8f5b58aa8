"""The names that the tensors of a version have in checkpoints, by which vLLM loads them.

Transformers fuses the experts of a layer when it loads a checkpoint, and the trainer publishes what
it trains: `mlp.experts.gate_up_proj` [experts, 2 x ff, hidden] where the checkpoint has
`mlp.experts.0.gate_proj.weight` and so on, or another architecture's names. Every tensor of the
checkpoint is a part of one such tensor, row after row, so only names and offsets change: no byte
is copied.
"""

from __future__ import annotations

from math import prod

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from umbra.proto.errors import UsageError
from umbra.proto.records import TensorEntry

# A tensor of a checkpoint: its name, at which element of the model's tensor it begins, its shape.
_TensorPart = tuple[str, int, tuple[int, ...]]


class CheckpointNames:
    """Names of the tensors of `model`, which may be without weights, in its checkpoints.

    Raises UsageError: a checkpoint has them in another layout.
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
