"""Section of the value model."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.services.runtime.config.base import Section


class CriticConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of `trainer.advantage = "gae"` (preset `ppo_critic`)."""

    kind: Annotated[
        Literal["model", "head"],
        Meta(description="a model of its own, or a value head on the policy's hidden states"),
    ] = "model"
    path: Annotated[
        str,
        Meta(
            description="directory it starts from, as an earlier run wrote it; empty = the policy"
        ),
    ] = ""
    learning_rate: Annotated[float, Meta(description="its learning rate", gt=0)] = 1e-5
    epochs: Annotated[int, Meta(description="passes over each batch", ge=1)] = 1
    value_clip: Annotated[
        float, Meta(description="how far a value may move for its loss, as in PPO; 0 = any", ge=0)
    ] = 0.2
    max_grad_norm: Annotated[float, Meta(description="clipping of its gradient", gt=0)] = 1.0
    warmup_steps: Annotated[
        int, Meta(description="first steps in which it alone learns, not the policy", ge=0)
    ] = 0
