"""What the forward passes of a batch showed, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.trainer.batch import Batch
from umbra.services.trainer.metrics import Row, ess, mismatch_metrics
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.ratios import ratio
from umbra.services.trainer.ranks import Ranks

COLUMNS = ("update", "logprob", "entropy", "advantage", "ratio", "clipped", "masked", "kl")


class LossMetrics:
    """Collects the passes of a batch; everything stays on the device until the end.

    In each epoch a token is seen once on one of the ranks, so sums over the ranks put the whole
    together.

    Args:
        batch: M learned tokens.
        found: logprobs under the weights that the batch found, [M], where a pass was spent on them.
        parts: how many optimizer steps an epoch is cut into.
        updates: optimizer steps of all epochs.
    """

    def __init__(self, batch: Batch, found: Tensor | None, parts: int, updates: int) -> None:
        self._batch = batch
        self._found = found
        self._per_epoch = parts
        self._updates = updates
        self._parts: list[tuple[Tensor, Tensor]] = []  # which tokens [N], their columns [8, N]
        self._losses: list[Tensor] = []
        self._knows_kl = False

    def add(
        self, update: int, source: Tensor, tokens: TokenInputs, result: TokenLosses, loss: Tensor
    ) -> None:
        """Keep a micro-batch's results, without their graph; `source` names its tokens."""
        now = tokens.logprobs.detach()
        columns = (
            torch.full_like(now, update + 1.0),  # 0: a token that no update saw
            now,
            tokens.entropy.detach(),
            tokens.advantages,
            result.ratio,
            result.clipped,
            ~result.kept,
            torch.zeros_like(now) if result.kl is None else result.kl,
        )
        # A row of the table for each token and epoch.
        where = source + update // self._per_epoch * len(self._batch.behaviour)
        self._parts.append((where, torch.stack([column.to(now) for column in columns])))
        self._losses.append(loss.detach())
        self._knows_kl = result.kl is not None

    def summary(self, version: int, per_version: int, ranks: Ranks) -> Row:
        """Means over the trained tokens of all epochs; None where there were none.

        A token is clipped where its gain has no gradient (or its weight is clipped: CISPO), masked
        where it has no gain. /positive and /negative are shares of the tokens with such an
        advantage. The mismatch to the generators is that of the weights the batch found, so it is
        taken from their logprobs, or else from the tokens of the first update. What the further
        updates add is in `ess_last`, the effective share of samples at the last of them, and in the
        staleness counted in updates, `per_version` for a version.
        """
        if not self._updates:
            empty = torch.zeros(0)
            row: Row = dict.fromkeys(("loss", "entropy", "clip_fraction", "mask_fraction"))
            row["ess_last"] = None
            return row | mismatch_metrics(empty, empty, empty.bool())
        epochs = self._updates // self._per_epoch
        table = torch.zeros(len(COLUMNS), epochs * len(self._batch.behaviour))
        for source, columns in self._parts:
            table[:, source] = columns.float().cpu()
        table = ranks.sum(table)
        loss = ranks.sum(torch.stack(self._losses).double().sum().cpu())
        seen = table[0] > 0
        column: dict[str, Tensor] = dict(zip(COLUMNS, table[:, seen], strict=True))
        row = {
            "loss": float(loss) / self._updates,
            "entropy": float(column["entropy"].mean()),
            "ratio/max": float(column["ratio"].max()),
        }
        if self._knows_kl:
            row["kl"] = float(column["kl"].mean())
        advantage = column["advantage"]
        for name, flag in (("clip_fraction", "clipped"), ("mask_fraction", "masked")):
            row[name] = float(column[flag].mean())
            row[f"{name}/positive"] = _mean(column[flag][advantage > 0])
            row[f"{name}/negative"] = _mean(column[flag][advantage < 0])
        behaviour = self._batch.behaviour
        last = table[0] == self._updates
        sampled = behaviour.repeat(epochs)[last].double()
        row["ess_last"] = ess(ratio(table[1, last].double(), sampled))
        age = (version - self._batch.oldest).double().repeat(epochs) * per_version + table[0] - 1
        row["staleness/updates/mean"] = float(age[seen].mean())
        row["staleness/updates/max"] = float(age[seen].max())
        first, logprobs = table[:2, : len(behaviour)]
        unchanged = first == 1
        if self._found is not None:
            unchanged, logprobs = first > 0, self._found
        return row | mismatch_metrics(
            logprobs[unchanged],
            behaviour[unchanged],
            self._batch.on_policy(version)[unchanged],
        )


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
