"""Which earlier positions each layer of a model attends to, and by which backend.

Transformers calls our attention (`attention_backends.py`). The torch engine gives it a `SlotMask`.
Packed rows (`Scorer`, the value model) have the backend that is right for the device and the rows:

| backend | where | in memory |
|---|---|---|
| `sdpa` | anywhere | a mask of all pairs of a row, [R, 1, L, L]; with soft caps or sinks: scores |
| `flex` | CUDA | linear in the row; flex_attention with a mask of blocks |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling import attention_probe
from umbra.services.modeling.architectures import keeps_state, layer_kinds
from umbra.services.modeling.attention_backends import NAME
from umbra.services.modeling.micro_batch import RowMask

log = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"  # Transformers' names of kinds of layers
_BESIDE_STATES = (FULL, "linear_attention", "conv", "hybrid", "moe", "mlp")
SLOW = (
    "flex_attention is not used on this GPU: %s. Packed rows take a mask of all pairs, several "
    "times slower and with memory by the square of trainer.pack_tokens: install a torch whose "
    "flex_attention works here, or lower trainer.pack_tokens and trainer.micro_tokens"
)
RowMasks = Tensor | BlockMask | dict[str, Any]
Choice = Literal["auto", "sdpa", "flex"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The windows of a model's layers, and the backend of packed rows.

    Positions count within a sequence, so that a window reaches from a response into the prompt
    that it shares with others, wherever in the row that prompt lies.
    """

    windows: tuple[tuple[str, int | None], ...] = ((FULL, None),)
    """By kind of attention, how many tokens a position sees, itself included; None: all."""
    backend: Choice = "sdpa"  # of packed rows
    plain: bool = True  # scores have no soft cap, and there are no sinks
    flexes: bool = True  # flex_attention is right on this GPU; else `auto` takes a dense mask
    recurrent: bool = False  # layers carry a state from token to token: a row has one sequence

    @classmethod
    def prepare(cls, model: PreTrainedModel, device: torch.device) -> Attention:
        """Have `model`, which computes on `device`, attend by our backends, for rows of `express`.

        flex_attention is compared with a dense mask on the GPU first (`attention_probe.py`), and
        not used where it is wrong.

        Raises:
            UsageError: a kind of layer that is none of ours.
        """
        attention = cls.of(model.config)
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
        attention = replace(attention, backend="auto", plain=not (capped or sinks))
        if device.type == "cuda" and not attention.recurrent:  # of these, rows need no mask
            scales = (getattr(module, "scaling", None) for module in model.modules())
            scale = next((found for found in scales if isinstance(found, float)), None)
            shape = attention_probe.Shape.of(model.config, sinks=sinks, scale=scale)
            windows = [window for _, window in attention.windows]
            faults = (attention_probe.fault(shape, w, device, torch.bfloat16) for w in windows)
            fault = next((one for one in faults if one is not None), None)
            if fault is not None:
                log.error(SLOW, fault)
            attention = replace(attention, flexes=fault is None)
        model.set_attn_implementation(NAME)
        return attention

    @classmethod
    def of(cls, config: Any) -> Attention:
        """Return the windows of a loaded model's Transformers config.

        Classes that have `layer_types` take one mask for each kind of layer; others have one
        window, `sliding_window`, for all layers.

        Raises:
            UsageError: a kind of layer that is none of ours.
        """
        window: int | None = getattr(config, "sliding_window", None)
        recurrent = keeps_state(config)
        sizes: dict[str, int | None] = (
            dict.fromkeys(_BESIDE_STATES) if recurrent else {FULL: None, SLIDING: window}
        )
        kinds = sorted(set(layer_kinds(config) or [SLIDING if window else FULL]))
        strange = [kind for kind in kinds if kind not in sizes]
        if strange:
            raise UsageError(f"{config.model_type} has layers of type {', '.join(strange)}")
        if recurrent:
            return cls(((FULL, None),) if {FULL, "hybrid"} & {*kinds} else (), recurrent=True)
        return cls(tuple((kind, sizes[kind]) for kind in kinds))

    def express(self, rows: RowMask) -> RowMasks | None:
        """Return the `attention_mask` of a pass over packed rows, one for each kind of layer.

        None: the model's own causal attention is exact.
        """
        if self.recurrent:
            assert rows.segment is None, "a row of such a model has one sequence"
            return None
        backend = self._backend(rows)
        if backend == "sdpa" and rows.segment is None:
            return None
        masks: dict[str, Any] = {}
        for kind, window in self.windows:
            reach = rows.within(window)
            masks[kind] = reach.blocks() if backend == "flex" else reach.allowed().unsqueeze(1)
        if len(masks) > 1:
            return masks
        (mask,) = masks.values()
        return mask

    def _backend(self, rows: RowMask) -> Choice:
        if self.backend != "auto":
            return self.backend
        if rows.positions.device.type != "cuda" or not self.flexes:
            return "sdpa"
        # Causal SDPA needs no mask: its fast kernel runs.
        width = rows.positions.shape[1]
        windows = any(window is not None and window < width for _, window in self.windows)
        return "sdpa" if rows.segment is None and self.plain and not windows else "flex"
