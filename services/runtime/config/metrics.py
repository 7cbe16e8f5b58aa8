"""Where the trainer's metrics go besides metrics.jsonl."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.services.runtime.config.base import Section


class MetricsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics of the training steps; they are always in <run dir>/metrics.jsonl."""

    tensorboard: Annotated[
        bool, Meta(description="also write them for TensorBoard, to <run dir>/tensorboard")
    ] = False
    wandb: Annotated[
        Literal["off", "offline", "online"],
        Meta(description="also log them with Weights & Biases: in <run dir>/wandb, or online"),
    ] = "off"
    wandb_project: Annotated[str, Meta(description="project at Weights & Biases", min_length=1)] = (
        "umbra"
    )
