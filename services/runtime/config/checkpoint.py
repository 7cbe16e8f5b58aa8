"""What the trainer saves, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.services.runtime.config.base import Section


class CheckpointConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the trainer, in <run dir>/checkpoints."""

    every: Annotated[
        int,
        Meta(description="steps between checkpoints; the last step has one too; 0 = none", ge=0),
    ] = 20
    keep: Annotated[
        int, Meta(description="newest checkpoints that are kept; each can be gone on from", ge=1)
    ] = 2
    best_metric: Annotated[
        str,
        Meta(description="also keep the checkpoint whose step has the best value of this metric"),
    ] = ""
    best_mode: Annotated[
        Literal["max", "min"], Meta(description="whether the highest or the lowest value is best")
    ] = "max"
