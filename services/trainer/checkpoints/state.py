"""What a checkpoint is made of: the states of models.

Tensors are sharded by rows (DTensors) or the same on all ranks; either way each rank saves its
share of the rows and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from umbra.proto.errors import UsageError
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.trainer.optimizer import MasterWeights, rows_like

if TYPE_CHECKING:
    from umbra.services.trainer.checkpoints.loader import Saved

SHOWN = 3  # names in an error


class ModelState:
    """What is trained of a model, its buffers, and the moments of its optimizer.

    What is frozen is where the run began.

    Args:
        name: begins the names of its tensors.
        optimizer: None: moments are neither saved nor read.
        base: checksum of the weights that the run began with, if some of them are frozen.
        master_weights: the float32 copies of parameters, which are saved in their place.
        settle: waits until nothing changes them.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        base: str = "",
        master_weights: MasterWeights | None = None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self._model = model
        self._optimizer = optimizer
        self._base = base
        self._master_weights = master_weights or MasterWeights((), None)
        self._settle = settle

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers as `NAME/...`, moments as `NAME-optimizer/PARAMETER.KEY`."""
        self._settle()
        # Only AdamW8bit has tensors that cannot be stored as they are.
        unpack = getattr(self._optimizer, "unpack", lambda _, state: state)
        held = {} if self._optimizer is None else self._optimizer.state
        moments = {
            f"{self._moments}{name}.{key}": value
            for name, parameter in self._trained().items()
            for key, value in unpack(parameter, held.get(parameter, {})).items()
            if isinstance(value, Tensor)
        }
        return {**self._weights(), **moments}

    def facts(self) -> dict[str, Any]:
        """Return what else there is, as JSON has it."""
        return {"base": self._base, "optimizer": type(self._optimizer).__name__}

    @torch.no_grad()
    def load(self, saved: Saved) -> None:
        """Overwrite tensors and facts; UsageError if they are of another model or optimizer."""
        self._check_facts(saved.source, saved.facts.get(self.name, {}))
        places = self._weights()
        self._check_names(saved, places)
        found: dict[nn.Parameter, dict[str, Tensor]] = {}
        trained = self._trained()
        for full in sorted(saved.names(self._moments)) if self._optimizer is not None else ():
            name, _, key = full.removeprefix(self._moments).rpartition(".")
            parameter = trained[name]  # of the same names as the weights
            shape, dtype = saved.layout(full)
            if shape and parameter.dim() and shape[0] == len(parameter):
                place = rows_like(parameter, shape, dtype)
            else:
                place = torch.zeros(shape, dtype=dtype, device=parameter.device)
            places[full] = found.setdefault(parameter, {})[key] = place
        saved.fill(places)
        self._master_weights.push()
        if self._optimizer is not None:
            pack = getattr(self._optimizer, "pack", lambda _, state: state)
            self._optimizer.state.clear()
            for parameter, state in found.items():
                self._optimizer.state[parameter] = pack(parameter, state)

    @property
    def _moments(self) -> str:
        return f"{self.name}-optimizer/"

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self._model.named_parameters()
        return {name: self._master_weights.of(p) for name, p in named if p.requires_grad}

    def _weights(self) -> dict[str, Tensor]:
        reshard(self._model)
        stored = self._model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in self._model.named_buffers() if name in stored}
        return {f"{self.name}/{name}": t for name, t in {**self._trained(), **buffers}.items()}

    def _check_facts(self, source: str, facts: Mapping[str, Any]) -> None:
        base = facts.get("base", "")
        fault = ""
        if bool(base) != bool(self._base):
            kind, other = ("an adapter", "0") if base else ("all weights", "above 0")
            fault = f"is of {kind}, but trainer.lora_rank is {other}"
        elif base != self._base:
            fault = "is of an adapter for another base model than model.path"
        if fault:
            raise UsageError(
                f"{source} {fault}: go on with the one of before, or choose another --run-dir"
            )
        own = type(self._optimizer).__name__
        if self._optimizer is not None and facts.get("optimizer", own) != own:
            raise UsageError(
                f"{source} has the state of {facts['optimizer']}, but trainer.optimizer is {own}: "
                "go on with the optimizer of before"
            )

    def _check_names(self, saved: Saved, own: Mapping[str, Tensor]) -> None:
        there, cut = saved.names(f"{self.name}/"), len(self.name) + 1
        faults = [f"it has {name[cut:]}, model.path has not" for name in there if name not in own]
        faults += [f"it has no {name[cut:]}" for name in own if name not in there]
        faults += [
            f"{name[cut:]} is {saved.layout(name)[0]} there and {list(tensor.shape)} in model.path"
            for name, tensor in own.items()
            if name in there and saved.layout(name)[0] != list(tensor.shape)
        ]
        if faults:
            more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            raise UsageError(
                f"{saved.source} is of another model: {'; '.join(faults[:SHOWN])}{more}; go on "
                "with the model.path and LoRA settings of before, or choose another --run-dir"
            )
