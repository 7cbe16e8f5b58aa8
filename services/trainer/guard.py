"""Keeps tokens and updates from doing harm, and ends a run that has gone wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from umbra.proto.errors import DivergedError
from umbra.services.config.presets import ObjectiveSpec
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.terms import Sequences

# Why an update is left out, in the order of the columns `skipped/<reason>`.
REASONS = {
    "loss": "its loss is not finite",
    "outliers": "all its tokens have logprobs that are not finite, or more than 10,000 "
    "times the generator's probability",
    "gradient": "its gradient is not finite",
}


class Guard:
    """Watches the forward passes of one update; all ranks come to the same verdict.

    Args:
        max_ratio: bound on pi / mu of a learned token; 0 = none.
        pieces: of the objective: where a sequence's tokens share a ratio, one that is out of bounds
            takes the whole sequence along.
    """

    def __init__(self, max_ratio: float, pieces: ObjectiveSpec, ranks: Ranks) -> None:
        self._bound = math.log(max_ratio) if max_ratio else math.inf
        self._whole = pieces.by_sequence
        self._ranks = ranks
        self._seen: list[Tensor] = []  # [3] of each pass, on the device

    def outliers(self, logprobs: Tensor, behaviour: Tensor, sequences: Sequences) -> Tensor:
        """Which of a pass's N tokens must not enter the loss, bool [N].

        Those whose log pi is not finite, or whose pi / mu is above the bound.
        """
        log_ratio = logprobs.detach() - behaviour
        out = ~log_ratio.isfinite() | (log_ratio > self._bound)
        if self._whole:
            out = sequences.sum(out.to(behaviour)) > 0
        return out

    def see(self, loss: Tensor, outliers: Tensor) -> None:
        """A pass: its loss, and which of its tokens were left out."""
        counts = [outliers.sum(), torch.tensor(len(outliers), device=outliers.device)]
        self._seen.append(torch.stack([(~loss.detach().isfinite()).long(), *counts]))

    def verdict(self) -> str:
        """Why the update must not be made, as a key of `REASONS`; empty if it may be."""
        found = torch.zeros(3, dtype=torch.int64)
        if self._seen:
            found = torch.stack(self._seen).sum(0).cpu()
        loss, out, tokens = self._ranks.sum(found).tolist()
        return "loss" if loss else "outliers" if tokens and out == tokens else ""


class SkipLimit:
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
                f"left out, because {why}; the weights are those of step "
                f"{step - self._in_a_row}: lower trainer.learning_rate or trainer.max_grad_norm, "
                "or choose an objective that clips"
            )
        return why
