"""What the forward passes of a batch showed, as sums over tokens; no token is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.metrics import MISMATCH, Row, ess, mismatch_row, mismatch_sums
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.ratios import ratio
from umbra.services.trainer.ranks import Ranks

# Sums over the tokens that were seen, all epochs; /+ and /- those with such an advantage.
SUMS: tuple[str, ...] = (
    "tokens", "entropy", "kl", "age", "outliers", "loss", "last", "last/r", "last/r2",
    "tokens/+", "clipped", "clipped/+", "clipped/-",
    "tokens/-", "masked", "masked/+", "masked/-",
)  # fmt: skip
MAXIMA: tuple[str, ...] = ("ratio", "age")


class LossMetrics:
    """Adds up the passes of a batch on the device; the ranks exchange a row of sums each.

    In each epoch a token is seen once on one of the ranks, so sums over the ranks are those of the
    whole.

    Args:
        batch: M learned tokens.
        found: logprobs under the weights that the batch found, [M], where a pass was spent on them.
        parts: how many optimizer steps an epoch is cut into.
        updates: optimizer steps of all epochs.
        version: of the weights that the batch found.
        per_version: optimizer updates of a version, for the staleness counted in them.
    """

    def __init__(
        self,
        batch: TrainBatch,
        found: Tensor | None,
        parts: int,
        updates: int,
        *,
        version: int,
        per_version: int,
    ) -> None:
        self._batch = batch
        self._found = found
        self._per_epoch = parts
        self._updates = updates
        self._age = (version - batch.oldest) * per_version  # [M]
        self._on_policy = batch.leading(version)
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self._maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64)
        self._mismatch = torch.zeros(len(MISMATCH), dtype=torch.float64)
        self._knows_kl = False

    def add(
        self,
        update: int,
        source: Tensor,
        tokens: TokenInputs,
        result: TokenLosses,
        loss: Tensor,
        outliers: Tensor,
    ) -> None:
        """Add a micro-batch's results; `source` names its tokens, `outliers` [N] are left out."""
        now = tokens.logprobs.detach()
        here = now.device
        if self._sums.device != here:
            self._sums, self._maxima = self._sums.to(here), self._maxima.to(here)
            self._mismatch = self._mismatch.to(here)
        if not len(source):
            self._sums[SUMS.index("loss")] += loss.detach().double()
            return
        seen = ~outliers
        age = self._age[source].to(here) + update
        positive, negative = tokens.advantages > 0, tokens.advantages < 0
        masked = ~result.kept | outliers
        clipped = result.clipped & seen
        last = seen & (update == self._updates - 1)
        weight = torch.where(last, ratio(now.double(), tokens.behaviour.double()), 0.0)
        columns = {
            "tokens": torch.ones_like(now),
            "entropy": tokens.entropy.detach(),
            "kl": torch.zeros_like(now) if result.kl is None else result.kl,
            "age": age,
            "outliers": outliers,
            "last": last,
            "last/r": weight,
            "last/r2": weight.square(),
            "tokens/+": positive,
            "tokens/-": negative,
            "clipped": clipped,
            "clipped/+": clipped & positive,
            "clipped/-": clipped & negative,
            "masked": masked,
            "masked/+": masked & positive,
            "masked/-": masked & negative,
        }
        sums = {name: column.double().sum() for name, column in columns.items()}
        sums["loss"] = loss.detach().double()
        self._sums += torch.stack([sums[name] for name in SUMS])
        ratios = torch.where(seen, result.ratio.double(), -torch.inf)
        highest = torch.stack([ratios.max(), age.double().max()])
        self._maxima = torch.maximum(self._maxima, highest)
        self._knows_kl = result.kl is not None
        if update < (1 if self._found is None else self._per_epoch):
            logprobs = now if self._found is None else self._found[source].to(now)
            self._mismatch += mismatch_sums(
                logprobs, tokens.behaviour, self._on_policy[source].to(here), seen
            )

    def summary(self, ranks: Ranks) -> Row:
        """Means over the trained tokens of all epochs; None where there were none.

        A token is clipped where its gain has no gradient (or its weight is clipped: CISPO), masked
        where it has no gain. /positive and /negative are shares of the tokens with such an
        advantage. Outliers count as masked, and in no ratio. The mismatch to the generators is that
        of the weights the batch found, so it is taken from their logprobs, or else from the tokens
        of the first update. What the further updates add is in `ess_last`, the effective share of
        samples at the last of them, and in the staleness counted in updates.
        """
        if not self._updates:
            row: Row = dict.fromkeys(("loss", "entropy", "clip_fraction", "mask_fraction"))
            row |= {"ess_last": None, "outliers": 0.0}
            return row | mismatch_row(self._mismatch)
        # Each rank's sums and maxima: some dozen numbers, however many tokens there are.
        rows = ranks.gather(torch.cat([self._sums, self._mismatch, self._maxima]).cpu())
        total = rows[:, : -len(MAXIMA)].sum(0)
        sums = dict(zip(SUMS, total[: len(SUMS)].tolist(), strict=True))
        highest = dict(zip(MAXIMA, rows[:, -len(MAXIMA) :].amax(0).tolist(), strict=True))
        row = {
            "loss": sums["loss"] / self._updates,
            "entropy": _share(sums["entropy"], sums["tokens"]),
            "ratio/max": highest["ratio"],
            "outliers": sums["outliers"],
        }
        if self._knows_kl:
            row["kl"] = _share(sums["kl"], sums["tokens"])
        for name, flag in (("clip_fraction", "clipped"), ("mask_fraction", "masked")):
            row[name] = _share(sums[flag], sums["tokens"])
            row[f"{name}/positive"] = _share(sums[f"{flag}/+"], sums["tokens/+"])
            row[f"{name}/negative"] = _share(sums[f"{flag}/-"], sums["tokens/-"])
        row["ess_last"] = ess(sums["last/r"], sums["last/r2"], sums["last"])
        row["staleness/updates/mean"] = _share(sums["age"], sums["tokens"])
        row["staleness/updates/max"] = highest["age"]
        return row | mismatch_row(total[len(SUMS) :])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
