"""Keeps an update from doing harm, and ends a run that has gone wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from umbra.proto.errors import DivergedError
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.ranks import Ranks

# Why an update is left out, in the order of the columns `skipped/<reason>`.
REASONS = {
    "loss": "its loss is not finite",
    "ratio": "a token's ratio to the generator's probability is above trainer.max_ratio",
    "gradient": "its gradient is not finite",
}


class Guard:
    """Watches the forward passes of one update; all ranks come to the same verdict.

    Args:
        max_ratio: bound on pi / mu of every learned token; 0 = none.
    """

    def __init__(self, max_ratio: float, ranks: Ranks) -> None:
        self._bound = math.log(max_ratio) if max_ratio else math.inf
        self._ranks = ranks
        self._faults: list[Tensor] = []  # [2] of each pass, on the device

    def see(self, loss: Tensor, logprobs: Tensor, behaviour: Tensor) -> None:
        """A pass: its loss, and log pi and log mu of its N tokens."""
        ratios = logprobs.detach() - behaviour > self._bound
        self._faults.append(torch.stack([~loss.detach().isfinite(), ratios.any()]))

    def verdict(self) -> str:
        """Why the update must not be made, as a key of `REASONS`; empty if it may be."""
        found = torch.zeros(2)
        if self._faults:
            found = torch.stack(self._faults).any(0).float().cpu()
        loss, ratio = self._ranks.sum(found).tolist()
        return "loss" if loss else "ratio" if ratio else ""


class Patience:
    """Counts the batches whose updates were all left out.

    Args:
        limit: so many in a row are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def see(self, row: Row, step: int) -> str:
        """Why updates of this batch were left out, in words; empty if none was.

        Raises:
            DivergedError: it was one too many.
        """
        if not row["skipped"]:
            self._in_a_row = 0
            return ""
        why = " and ".join(text for name, text in REASONS.items() if row[f"skipped/{name}"])
        self._in_a_row = self._in_a_row + 1 if row["skipped"] == 1.0 else 0
        if self._in_a_row >= self._limit:
            raise DivergedError(
                f"stopped at step {step}: the updates of the last {self._in_a_row} batches were "
                f"left out (trainer.max_skipped), because {why}; the weights are those of step "
                f"{step - self._in_a_row}: lower trainer.learning_rate or trainer.max_grad_norm, "
                "or choose an objective that clips"
            )
        return why
