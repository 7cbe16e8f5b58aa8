"""One batch, one or more updates of the policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from umbra.services.modeling.packing import MicroBatch, pack
from umbra.services.runtime.config import RunConfig
from umbra.services.trainer.advantages import ADVANTAGES
from umbra.services.trainer.batch import Batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row, mismatch_metrics
from umbra.services.trainer.objectives import make_objective, token_weights
from umbra.services.trainer.ranks import Ranks


class PolicyUpdate:
    """Advantages, packing, loss and optimizer steps, as the configuration combines them."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self._config = config.trainer
        self._max_tokens = config.sampling.max_tokens
        self._learner = learner
        self._ranks = learner.ranks
        self._advantages = ADVANTAGES[config.trainer.advantage]
        self._objective = make_objective(config.trainer)

    def __call__(self, batch: Batch, version: int, keep_going: Callable[[], bool]) -> Row | None:
        """Update the policy, which is at `version`, on `batch`; what was measured on the way.

        Samples without advantage have no gradient, so no forward pass is spent on them; if no
        sample has any, nothing is updated. `keep_going` is asked before each micro-batch; where it
        says no, the result is None and the batch must not be committed. Of several ranks each does
        its share of the micro-batches, rank 0's `keep_going` counts, and all get the same result.
        """
        advantages = self._advantages(batch.rewards, batch.groups)
        own = torch.bincount(batch.tokens.owner, minlength=len(advantages))
        useful = ((advantages != 0) & (own > 0)).nonzero().squeeze(1)
        count = min(self._config.minibatches, len(useful))
        # Each minibatch takes every n-th sample, so that all have a part of every group.
        parts = [useful[number::count] for number in range(count)]
        packed = [self._pack(batch, part) for part in parts]
        fixed: Tensor | None = None
        if self._objective.around_proximal and count > 1:
            fixed = self._learner.logprobs([m for p in packed for m in p], batch.temperature)
        seen = _Observations(batch, fixed, count)
        updates: list[Row] = []
        for part, micros in zip(parts, packed, strict=True):
            weights = token_weights(
                self._config.aggregation,
                batch.tokens,
                part,
                samples=len(advantages) / count,
                length=self._max_tokens,
            )
            for micro in micros:
                if not self._ranks.agree(keep_going()):
                    return None
                here = micro.source
                logprobs, entropy = self._learner.score(micro, batch.temperature[here])
                # With a single update, p is what its own first pass finds.
                proximal = logprobs.detach() if fixed is None else fixed[here].to(logprobs)
                losses, clipped = self._objective(
                    logprobs,
                    batch.behaviour[here].to(logprobs),
                    proximal,
                    advantages[batch.tokens.owner[here]].to(logprobs),
                )
                loss = (losses * weights[here].to(logprobs)).sum()
                self._learner.backward(loss)
                seen.add(len(updates), micro, logprobs, entropy, clipped, loss)
            updates.append(self._learner.update(version))
        return {
            "trained_samples": float(len(useful)),
            "updates": float(count),
            **seen.summary(version, self._ranks),
            **_means(updates),
        }

    def _pack(self, batch: Batch, part: Tensor) -> list[MicroBatch]:
        return pack(
            batch.tokens,
            pack_tokens=self._config.pack_tokens,
            micro_tokens=self._config.micro_tokens,
            sequences=part,
            share_prompts=self._config.share_prompts,
            rank=self._ranks.rank,
            world=self._ranks.world,
        )


class _Observations:
    """What the forward passes of a batch showed; it stays on the device until the end.

    Each token is seen once on one of the ranks, so sums over the ranks put the whole together.

    Args:
        batch: M learned tokens.
        fixed: proximal logprobs [M], if they were computed beforehand.
        updates: how many optimizer steps the batch is cut into.
    """

    def __init__(self, batch: Batch, fixed: Tensor | None, updates: int) -> None:
        self._batch = batch
        self._fixed = fixed
        self._updates = updates
        self._parts: list[tuple[int, Tensor, Tensor]] = []  # update, source [N], columns [3, N]
        self._losses: list[Tensor] = []

    def add(
        self,
        update: int,
        micro: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        clipped: Tensor,
        loss: Tensor,
    ) -> None:
        """Keep the results of `micro`, without their graph."""
        columns = torch.stack([logprobs.detach(), entropy, clipped.to(entropy)])
        self._parts.append((update, micro.source, columns))
        self._losses.append(loss.detach())

    def summary(self, version: int, ranks: Ranks) -> Row:
        """Means over the trained tokens.

        The mismatch to the generators is that of the weights the batch found, so it is taken from
        the proximal logprobs, or else from the tokens of the first update.
        """
        if not self._updates:
            empty = torch.zeros(0)
            row: Row = dict.fromkeys(("loss", "entropy", "clip_fraction"))
            return row | mismatch_metrics(empty, empty, empty.bool())
        # By token: which update saw it (counted from 1; 0: none did), logprob, entropy, clipped.
        table = torch.zeros(4, len(self._batch.behaviour))
        for update, source, columns in self._parts:
            table[0, source] = update + 1.0
            table[1:, source] = columns.float().cpu()
        table = ranks.sum(table)
        loss = ranks.sum(torch.stack(self._losses).double().sum().cpu())
        seen = table[0] > 0
        unchanged = seen if self._fixed is not None else table[0] == 1
        logprobs = table[1] if self._fixed is None else self._fixed
        return {
            "loss": float(loss) / self._updates,
            "entropy": float(table[2, seen].mean()),
            "clip_fraction": float(table[3, seen].mean()),
            **mismatch_metrics(
                logprobs[unchanged],
                self._batch.behaviour[unchanged],
                self._batch.on_policy(version)[unchanged],
            ),
        }


def _means(rows: list[Row]) -> Row:
    """The mean of each column, over the updates of a batch; None where there is no number."""
    result: Row = {}
    for name in ("grad_norm", "lr", "skipped"):
        values = [value for row in rows if (value := row[name]) is not None]
        result[name] = sum(values) / len(values) if values else None
    return result
