"""Values of `LossMetrics`, computed from a table of all tokens of all epochs: the definition.

It needs a column of numbers for each token, so the trainer adds up sums instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import ratio

COLUMNS = ("update", "logprob", "entropy", "advantage", "ratio", "clipped", "masked", "kl")


class TokenTable:
    """Collects the passes of a batch, of all ranks.

    Args:
        batch: M learned tokens.
        found: logprobs under the weights that the batch found, [M], where a pass was spent on them.
        parts: how many optimizer steps an epoch is cut into.
        updates: optimizer steps of all epochs.
    """

    def __init__(self, batch: TrainBatch, found: Tensor | None, parts: int, updates: int) -> None:
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

    def summary(self, version: int, per_version: int) -> Row:
        epochs = self._updates // self._per_epoch
        table = torch.zeros(len(COLUMNS), epochs * len(self._batch.behaviour))
        for source, columns in self._parts:
            table[:, source] = columns.float().cpu()
        loss = torch.stack(self._losses).double().sum()
        seen = table[0] > 0
        column: dict[str, Tensor] = dict(zip(COLUMNS, table[:, seen], strict=True))
        row: Row = {
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
        return row | mismatch(
            logprobs[unchanged], behaviour[unchanged], self._batch.leading(version)[unchanged]
        )


def mismatch(logprobs: Tensor, behaviour: Tensor, on_policy: Tensor) -> Row:
    """k1, k3, chi2 and the effective share of samples."""
    log_ratio = (logprobs - behaviour).double()
    weight = ratio(logprobs.double(), behaviour.double())
    k3 = torch.expm1(log_ratio.clamp(max=20.0)) - log_ratio
    return {
        "mismatch/k1": float(-log_ratio.mean()),
        "mismatch/k3": float(k3.mean()),
        "mismatch/chi2": float(weight.square().mean()) - 1,
        "mismatch/k3_on_policy": float(k3[on_policy].mean()) if bool(on_policy.any()) else None,
        "ess": ess(weight),
    }


def ess(weight: Tensor) -> float:
    """(sum r)^2 / (N sum r^2)."""
    return float(weight.sum().square() / (weight.numel() * weight.square().sum()))


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
