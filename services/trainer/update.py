"""One batch, one or more updates of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.services.modeling.packing import MicroBatch, pack
from umbra.services.runtime.config import RunConfig
from umbra.services.trainer.advantages import ADVANTAGES
from umbra.services.trainer.batch import Batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row, mismatch_metrics
from umbra.services.trainer.objectives import make_objective, token_weights


class PolicyUpdate:
    """Advantages, packing, loss and optimizer steps, as the configuration combines them."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self._config = config.trainer
        self._max_tokens = config.sampling.max_tokens
        self._learner = learner
        self._advantages = ADVANTAGES[config.trainer.advantage]
        self._objective = make_objective(config.trainer)

    def __call__(self, batch: Batch, version: int, keep_going: Callable[[], bool]) -> Row | None:
        """Update the policy, which is at `version`, on `batch`; what was measured on the way.

        Samples without advantage have no gradient, so no forward pass is spent on them; if no
        sample has any, nothing is updated. `keep_going` is asked before each micro-batch; where it
        says no, the result is None and the batch must not be committed.
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
        seen = _Observations(batch, fixed)
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
                if not keep_going():
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
            **seen.summary(version),
            **_means(updates),
        }

    def _pack(self, batch: Batch, part: Tensor) -> list[MicroBatch]:
        return pack(
            batch.tokens,
            pack_tokens=self._config.pack_tokens,
            micro_tokens=self._config.micro_tokens,
            sequences=part,
        )


@dataclass(frozen=True, slots=True)
class _Observation:
    update: int
    source: Tensor  # int64 [N]
    logprobs: Tensor  # float32 [N]
    entropy: Tensor  # float32 [N]
    clipped: Tensor  # bool [N]
    loss: Tensor  # float32 []


class _Observations:
    """What the forward passes of a batch showed; it stays on the device until the end."""

    def __init__(self, batch: Batch, fixed: Tensor | None) -> None:
        self._batch = batch
        self._fixed = fixed
        self._all: list[_Observation] = []

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
        self._all.append(
            _Observation(update, micro.source, logprobs.detach(), entropy, clipped, loss.detach())
        )

    def summary(self, version: int) -> Row:
        """Means over the trained tokens.

        The mismatch to the generators is that of the weights the batch found, so it is taken from
        the proximal logprobs, or else from the tokens of the first update.
        """
        if not self._all:
            empty = torch.zeros(0)
            row: Row = dict.fromkeys(("loss", "entropy", "clip_fraction"))
            return row | mismatch_metrics(empty, empty, empty.bool())
        unchanged = [o for o in self._all if self._fixed is not None or o.update == 0]
        source = torch.cat([o.source for o in unchanged])
        if self._fixed is not None:
            logprobs = self._fixed[source]
        else:
            logprobs = torch.cat([o.logprobs for o in unchanged]).cpu()
        updates = self._all[-1].update + 1
        return {
            "loss": float(torch.stack([o.loss for o in self._all]).sum()) / updates,
            "entropy": float(torch.cat([o.entropy for o in self._all]).mean()),
            "clip_fraction": float(torch.cat([o.clipped for o in self._all]).float().mean()),
            **mismatch_metrics(
                logprobs, self._batch.behaviour[source], self._batch.on_policy(version)[source]
            ),
        }


def _means(rows: list[Row]) -> Row:
    """The mean of each column, over the updates of a batch; None where there is no number."""
    result: Row = {}
    for name in ("grad_norm", "lr", "skipped"):
        values = [value for row in rows if (value := row[name]) is not None]
        result[name] = sum(values) / len(values) if values else None
    return result
