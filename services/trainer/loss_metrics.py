"""What the forward passes of a batch showed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.trainer.batch import Batch
from umbra.services.trainer.metrics import Row, mismatch_metrics
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses


@dataclass(frozen=True, slots=True)
class _Pass:
    update: int
    source: Tensor  # int64 [N]
    logprobs: Tensor  # float32 [N]
    entropy: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    found: TokenLosses
    loss: Tensor  # float32 []


class LossMetrics:
    """Collects the passes of a batch; everything stays on the device until the end.

    Args:
        batch: the batch.
        found: logprobs under the weights that the batch found, [M], where a pass was spent on them.
    """

    def __init__(self, batch: Batch, found: Tensor | None) -> None:
        self._batch = batch
        self._found = found
        self._all: list[_Pass] = []

    def add(
        self, update: int, source: Tensor, tokens: TokenInputs, found: TokenLosses, loss: Tensor
    ) -> None:
        """Keep a micro-batch's results, without their graph; `source` names its tokens."""
        self._all.append(
            _Pass(
                update,
                source,
                tokens.logprobs.detach(),
                tokens.entropy.detach(),
                tokens.advantages,
                found,
                loss.detach(),
            )
        )

    def summary(self, version: int) -> Row:
        """Means over the trained tokens; None where there were none.

        A token is clipped where its gain has no gradient (or its weight is clipped: CISPO), masked
        where it has no gain. /positive and /negative are shares of the tokens with such an
        advantage. The mismatch to the generators is that of the weights the batch found, so it is
        taken from their logprobs, or else from the tokens of the first update.
        """
        if not self._all:
            empty = torch.zeros(0)
            row: Row = dict.fromkeys(("loss", "entropy", "clip_fraction", "mask_fraction"))
            return row | mismatch_metrics(empty, empty, empty.bool())
        updates = self._all[-1].update + 1
        advantages = torch.cat([one.advantages for one in self._all])
        row = {
            "loss": float(torch.stack([one.loss for one in self._all]).sum()) / updates,
            "entropy": float(torch.cat([one.entropy for one in self._all]).mean()),
            "ratio/max": float(torch.cat([one.found.ratio for one in self._all]).max()),
        }
        flags = {
            "clip_fraction": torch.cat([one.found.clipped for one in self._all]),
            "mask_fraction": ~torch.cat([one.found.kept for one in self._all]),
        }
        for name, flag in flags.items():
            row[name] = _share(flag, torch.ones_like(flag))
            row[f"{name}/positive"] = _share(flag, advantages > 0)
            row[f"{name}/negative"] = _share(flag, advantages < 0)
        kl = [one.found.kl for one in self._all if one.found.kl is not None]
        if kl:
            row["kl"] = float(torch.cat(kl).mean())
        return row | self._mismatch(version)

    def _mismatch(self, version: int) -> Row:
        unchanged = [one for one in self._all if self._found is not None or one.update == 0]
        source = torch.cat([one.source for one in unchanged])
        if self._found is not None:
            logprobs = self._found[source]
        else:
            logprobs = torch.cat([one.logprobs for one in unchanged]).cpu()
        on_policy = self._batch.on_policy(version)[source]
        return mismatch_metrics(logprobs, self._batch.behaviour[source], on_policy)


def _share(flags: Tensor, among: Tensor) -> float | None:
    """The share of `flags` that are set, of those where `among` is; None if it is nowhere."""
    return float(flags[among].float().mean()) if bool(among.any()) else None
