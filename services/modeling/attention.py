"""Which earlier positions each layer of a model attends to, as masks that its class takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from umbra.proto.errors import UsageError

FULL, SLIDING = "full_attention", "sliding_attention"  # Transformers' names of kinds of layers
Mask = Tensor | dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """The windows of a model's layers, and the form that its attention wants masks in.

    Positions are those of a sequence, so that a window reaches from a response into the prompt
    that it shares with others, wherever in the row that prompt lies.
    """

    windows: tuple[tuple[str, int | None], ...] = ((FULL, None),)
    """Of each kind of layer: how many tokens a position sees, itself included; None: all."""
    additive: bool = False
    """Masks are added to the scores (Transformers' eager attention) and can't be boolean."""

    @classmethod
    def of(cls, config: Any) -> Attention:
        """What the Transformers config of a loaded model says.

        Classes that have `layer_types` take one mask for each kind of layer; others have one
        window, `sliding_window`, for all layers.

        Raises:
            UsageError: a kind of layer that is none of ours.
        """
        window: int | None = getattr(config, "sliding_window", None)
        sizes = {FULL: None, SLIDING: window}
        kinds = sorted(set(getattr(config, "layer_types", None) or [SLIDING if window else FULL]))
        strange = [kind for kind in kinds if kind not in sizes]
        if strange:
            raise UsageError(f"{config.model_type} has layers of type {', '.join(strange)}")
        return cls(
            tuple((kind, sizes[kind]) for kind in kinds),
            additive=config._attn_implementation.endswith("eager"),  # or one around it
        )

    def masks(
        self,
        seen: Tensor,
        queries: Tensor,
        keys: Tensor,
        dtype: torch.dtype,
        *,
        additive: bool = False,
    ) -> Mask:
        """The `attention_mask` of a forward pass: [B, 1, Q, K], or one for each kind of layer.

        Args:
            seen: bool [B, Q, K], True = attend, if no layer had a window.
            queries: int64 [B, Q], the position of each query in its sequence.
            keys: int64 [B, K], the position of each key.
            dtype: of a mask that is added.
            additive: 0 and -inf instead of True and False, whatever the model asks for.
        """
        additive = additive or self.additive
        masks: dict[str, Tensor] = {}
        for kind, window in self.windows:
            allowed = seen
            if window is not None:
                allowed = seen & (queries[:, :, None] - keys[:, None, :] < window)
            masks[kind] = _added(allowed, dtype) if additive else allowed
            masks[kind] = masks[kind].unsqueeze(1)
        if len(masks) > 1:
            return masks
        (mask,) = masks.values()
        return mask


def _added(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, -torch.inf)
