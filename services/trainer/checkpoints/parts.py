"""What a checkpoint is made of: named parts, each with tensors of its own.

A trainer's state is a dict of parts by name; whoever trains something else besides (a critic, say)
adds parts. Tensors are sharded by rows (DTensors) or the same on all ranks; either way each rank
saves its share of the rows and no more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from umbra.proto.errors import UsageError
from umbra.services.trainer.checkpoints.loader import SavedPart
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.trainer.optimizer import MasterWeights, rows_like

SHOWN = 3  # names in an error


class CheckpointPart(Protocol):
    """Something whose state belongs to a checkpoint."""

    def tensors(self) -> Mapping[str, Tensor]: ...

    def facts(self) -> Mapping[str, Any]:
        """Return what else there is, as JSON has it; each rank saves and gets back its own."""
        ...

    def load(self, saved: SavedPart) -> None:
        """Take over a saved state.

        Raises:
            UsageError: it is not of such a thing; nothing is promised of the state then.
        """
        ...


class Weights:
    """What is trained of a model, and its buffers; what is frozen is where the run began.

    Args:
        base: checksum of the weights that the run began with, if some of them are frozen.
        master_weights: the float32 copies of parameters, which are saved in their place.
    """

    def __init__(
        self, model: nn.Module, base: str = "", master_weights: MasterWeights | None = None
    ) -> None:
        self._model = model
        self._base = base
        self._master_weights = master_weights or MasterWeights((), None)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters that are trained, and the buffers of a state dict, by their module's names."""
        reshard(self._model)
        stored = self._model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in self._model.named_buffers() if name in stored}
        weights = {name: self._master_weights.of(p) for name, p in trained(self._model).items()}
        return {**weights, **buffers}

    def facts(self) -> dict[str, Any]:
        return {"base": self._base}

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Overwrite the tensors.

        Raises:
            UsageError: the model has other tensors, or other frozen weights.
        """
        base = saved.facts.get("base", "")
        if bool(base) != bool(self._base):
            kind, other = ("an adapter", "0") if base else ("all weights", "above 0")
            raise UsageError(
                f"{saved.source} is of {kind}, but trainer.lora_rank is {other}: go on with the "
                "one of before, or choose another --run-dir"
            )
        if base != self._base:
            raise UsageError(
                f"{saved.source} is of an adapter for another base model than model.path: go on "
                "with the one of before, or choose another --run-dir"
            )
        own = self.tensors()
        check_names(saved, own)
        saved.fill(own)
        self._master_weights.push()


class OptimizerState:
    """The moments of an optimizer over the trained parameters of a model, by their names."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        master_weights: MasterWeights | None = None,
    ) -> None:
        self._optimizer = optimizer
        master_weights = master_weights or MasterWeights((), None)
        self._parameters = {name: master_weights.of(p) for name, p in trained(model).items()}
        self._scaler = scaler

    def tensors(self) -> dict[str, Tensor]:
        # Only AdamW8bit has tensors that cannot be stored as they are.
        unpack = getattr(self._optimizer, "unpack", lambda _, state: state)
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in unpack(parameter, self._optimizer.state.get(parameter, {})).items()
            if isinstance(value, Tensor)
        }

    def facts(self) -> dict[str, Any]:
        """Return the kind of optimizer, and the state of the scaler of fp16 gradients."""
        scale = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        return {"kind": type(self._optimizer).__name__, **scale}

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Overwrite the state.

        Raises:
            UsageError: it is that of another kind of optimizer, or of other parameters.
        """
        kind = type(self._optimizer).__name__
        if saved.facts.get("kind", kind) != kind:
            raise UsageError(
                f"{saved.source} has the state of {saved.facts['kind']}, but trainer.optimizer is "
                f"{kind}: go on with the optimizer of before"
            )
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        places: dict[str, Tensor] = {}
        for full in sorted(saved.names):  # all ranks in one order
            name, _, key = full.rpartition(".")
            parameter = self._parameters.get(name)
            if parameter is None:
                raise UsageError(f"{saved.source} is of another model: it has {full}, ours has not")
            shape, dtype = saved.layout(full)
            if shape and parameter.dim() and shape[0] == len(parameter):
                place = rows_like(parameter, shape, dtype)
            else:
                place = torch.zeros(shape, dtype=dtype, device=parameter.device)
            places[full] = found.setdefault(parameter, {})[key] = place
        saved.fill(places)
        pack = getattr(self._optimizer, "pack", lambda _, state: state)
        self._optimizer.state.clear()
        for parameter, state in found.items():
            self._optimizer.state[parameter] = pack(parameter, state)
        if self._scaler is not None and "scaler" in saved.facts:
            self._scaler.load_state_dict(saved.facts["scaler"])


class Randomness:
    """The random number generators of this process: torch's, that of its GPU, and Python's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def facts(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        facts: dict[str, Any] = {
            "torch": _as_hex(torch.get_rng_state()),
            "python": [version, list(numbers), gauss],
        }
        if self._device.type == "cuda":
            facts["cuda"] = _as_hex(torch.cuda.get_rng_state(self._device))
        return facts

    def load(self, saved: SavedPart) -> None:
        facts = saved.facts
        if "torch" in facts:
            torch.set_rng_state(_of_hex(facts["torch"]))
        if "cuda" in facts and self._device.type == "cuda":
            torch.cuda.set_rng_state(_of_hex(facts["cuda"]), self._device)
        if "python" in facts:
            version, numbers, gauss = facts["python"]
            random.setstate((version, tuple(numbers), gauss))


def _as_hex(state: Tensor) -> str:
    return bytes(state.numpy()).hex()


def _of_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_names(saved: SavedPart, own: Mapping[str, Tensor]) -> None:
    """Compare names and shapes.

    Raises:
        UsageError: they differ.
    """
    faults = [f"it has {name}, model.path has not" for name in saved.names if name not in own]
    faults += [f"it has no {name}" for name in own if name not in saved.names]
    faults += [
        f"{name} is {saved.layout(name)[0]} there and {list(tensor.shape)} in model.path"
        for name, tensor in own.items()
        if name in saved.names and saved.layout(name)[0] != list(tensor.shape)
    ]
    if faults:
        more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise UsageError(
            f"{saved.source} is of another model: {'; '.join(faults[:SHOWN])}{more}; go on with "
            "the model.path and LoRA settings of before, or choose another --run-dir"
        )
