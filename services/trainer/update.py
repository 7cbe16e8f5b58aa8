"""One batch, one or more updates of the policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from umbra.services.config import RunConfig
from umbra.services.config.presets import ObjectiveSpec
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.trainer.batch import TrainBatch, recorded_logprobs
from umbra.services.trainer.critic import Critic
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import REASONS, Learner
from umbra.services.trainer.metrics import LossMetrics, Row
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.objectives.advantages import batch_advantages
from umbra.services.trainer.objectives.objective import (
    Candidates,
    Objective,
    TokenInputs,
    token_weights,
)
from umbra.services.trainer.objectives.terms import LOG_RATIO_BOUND, Sequences


class PolicyUpdate:
    """Advantages, packing, loss and optimizer steps, as the configuration combines them.

    Raises:
        UsageError: advantages by a value model without one.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        critic: Critic | None = None,
        mismatch_check: MismatchCheck | None = None,
    ) -> None:
        self._config, self._pieces = config, config.trainer.pieces
        self._learner, self._ranks = learner, learner.ranks
        self._critic, self._check = critic, mismatch_check
        self._objective = Objective(self._pieces)

    def __call__(
        self, batch: TrainBatch, version: int, keep_going: Callable[[], bool]
    ) -> Row | None:
        """Update the policy, which is at `version`, on `batch`; return its metrics.

        Samples without advantage have no gradient, unless a KL or an entropy bonus is part of the
        loss, so no forward pass is spent on them; if no sample has any, nothing is updated.
        `keep_going` is asked before each micro-batch; where it says no, the result is None and the
        batch must not be committed. Of several ranks each does its share of the micro-batches, rank
        0's `keep_going` counts, and all get the same result.
        """
        pieces, trainer, critic = self._pieces, self._config.trainer, self._critic
        scored = "ref_logp" in self._config.buffer.stages
        reference = recorded_logprobs(batch, "ref_logprobs") if scored else None
        values = None
        if critic is not None:
            with self._learner.phases("critic"):
                values = critic.values(batch)
        advantages, returns = batch_advantages(batch, pieces, reference, values)
        # Learned tokens of each line; none of those that are filtered.
        owner = batch.tokens.owner
        counts = torch.bincount(owner, minlength=len(batch.trajectories))
        if pieces.overlong_filter:
            counts[torch.tensor([t.finish_reason == "length" for t in batch.trajectories])] = 0
        useful_lines = counts > 0
        if not pieces.regularised:
            useful_lines &= torch.bincount(owner[advantages != 0], minlength=len(counts)) > 0
        useful = useful_lines.nonzero().squeeze(1)  # the lines that a forward pass is spent on
        if critic is not None and version < self._config.critic.warmup_steps:
            useful = useful[:0]
        samples = batch.sample[useful].unique()
        cuts, seed = min(trainer.minibatches, len(samples)), f"{self._config.run.seed}/{version}"
        chosen = minibatches(samples, cuts, trainer.epochs, seed)
        parts = [batch.lines_of(part, useful) for part in chosen]
        pack = self._learner.pack
        first = [pack(batch.tokens, part) for part in parts[:cuts]]  # every sample once
        agreed = self._check(batch, version) if self._check is not None else {}
        recomputed = self._recomputed(batch, first, len(parts))
        known = recomputed
        if pieces.uses_proximal and pieces.proximal == "stage":
            known = recorded_logprobs(batch, "proximal_logprobs")
        per_version = trainer.updates_per_batch
        metrics = LossMetrics(batch, recomputed, cuts, len(parts), version, per_version)
        supports = batch.tokens.support if trainer.score_centering > 0 else None
        rows: list[Row] = []
        for number, part in enumerate(parts):
            micros = first[number] if number < cuts else pack(batch.tokens, part)
            guard = Guard(trainer.max_ratio, pieces, self._ranks)
            weights = token_weights(
                pieces, owner, counts, part, cuts, self._config.longest_turn, batch.weight
            )
            balance = self._learner.balance(micros)
            for micro in micros:
                if not self._ranks.agree(keep_going()):
                    return None
                source = micro.source
                scores, entropy = self._learner.score(
                    micro,
                    batch.temperature[source],
                    entropy_gradient=pieces.entropy_coef > 0,
                    with_support=supports is not None,
                    balance=balance,
                )
                logprobs = scores if supports is None else scores[:, 0]
                behaviour = batch.behaviour[source].to(logprobs)
                sequences = Sequences(owner[source].to(logprobs.device), len(counts))
                outliers = guard.outliers(logprobs, behaviour, sequences)
                # Left out before anything is computed from them: zero times NaN is NaN.
                logprobs = torch.where(outliers, behaviour, logprobs)
                tokens = TokenInputs(
                    logprobs=logprobs,
                    behaviour=behaviour,
                    proximal=logprobs.detach() if known is None else known[source].to(logprobs),
                    advantages=advantages[source].to(logprobs),
                    sequences=sequences,
                    entropy=torch.where(outliers, 0.0, entropy),
                    reference=None if reference is None else reference[source].to(logprobs),
                    candidates=None
                    if supports is None
                    else Candidates.of(supports, source, scores[:, 1:], outliers),
                )
                result = self._objective(tokens)
                losses = torch.where(outliers, 0.0, result.losses)
                loss = (losses * weights[source].to(logprobs)).sum()
                guard.see(loss, outliers)
                self._learner.backward(loss)
                metrics.add(number, source, tokens, result, loss, outliers)
            rows.append(self._learner.update(version, guard.verdict()))
        row: Row = {
            "trained_samples": float(len(samples)),
            "updates": float(len(parts)),
            **metrics.summary(self._ranks),
            **_means(rows),
            **agreed,
            **self._learner.expert_load(),
        }
        if critic is not None and values is not None:
            row |= critic.learn(values, returns)
        return row

    def _recomputed(
        self, batch: TrainBatch, packed: list[list[MicroBatch]], updates: int
    ) -> Tensor | None:
        """Find logprobs under the weights that the batch found, [M], if that needs a pass.

        With a single update, p is what its own pass finds.
        """
        pieces = self._pieces
        asked = pieces.uses_proximal and pieces.proximal == "recompute"
        if not asked or updates < 2:
            return None
        logprobs = self._learner.logprobs([m for p in packed for m in p], batch.temperature)
        # The pass of the update finds such a token too and leaves it out.
        return torch.where(logprobs.isfinite(), logprobs, batch.behaviour + LOG_RATIO_BOUND)


class Guard:
    """A watch over the forward passes of one update; all ranks come to the same verdict.

    Where a sequence's tokens share a ratio, one that is out of bounds takes it all along.
    """

    def __init__(self, max_ratio: float, pieces: ObjectiveSpec, ranks: Ranks) -> None:
        self._bound = math.log(max_ratio) if max_ratio else math.inf
        self._whole = pieces.by_sequence
        self._ranks = ranks
        self._seen: list[Tensor] = []  # [3] of each pass, on the device

    def outliers(self, logprobs: Tensor, behaviour: Tensor, sequences: Sequences) -> Tensor:
        """Return which of a pass's N tokens must not enter the loss, bool [N].

        Those whose log pi is not finite, or whose pi / mu is above the bound.
        """
        log_ratio = logprobs.detach() - behaviour
        outliers = ~log_ratio.isfinite() | (log_ratio > self._bound)
        if self._whole:
            outliers = sequences.sum(outliers.to(behaviour)) > 0
        return outliers

    def see(self, loss: Tensor, outliers: Tensor) -> None:
        """Take the loss of a pass, and which of its tokens were left out."""
        counts = [outliers.sum(), torch.tensor(len(outliers), device=outliers.device)]
        self._seen.append(torch.stack([(~loss.detach().isfinite()).long(), *counts]))

    def verdict(self) -> str:
        """Return why the update must not be made, a key of `REASONS`; empty if it may be."""
        counts = torch.zeros(3, dtype=torch.int64)
        if self._seen:
            counts = torch.stack(self._seen).sum(0).cpu()
        loss, outliers, tokens = self._ranks.sum(counts).tolist()
        return "loss" if loss else "outliers" if tokens and outliers == tokens else ""


def _means(rows: list[Row]) -> Row:
    """Return the mean of each column over the updates of a batch; None without numbers."""
    result: Row = {}
    for name in ("grad_norm", "lr", "skipped", *(f"skipped/{reason}" for reason in REASONS)):
        values = [value for row in rows if (value := row[name]) is not None]
        result[name] = sum(values) / len(values) if values else None
    return result


def minibatches(samples: Tensor, count: int, epochs: int, seed: str) -> list[Tensor]:
    """Return `epochs` passes over `samples` (int64 indices), each cut into `count` parts.

    A part takes every n-th sample. In the first pass samples are in the order of the batch, so that
    all parts have some of every group; later passes are shuffled. The order follows from `seed`
    and the pass alone: all ranks, and a trainer that starts again, find the same.
    """
    parts: list[Tensor] = []
    for epoch in range(epochs):
        order = list(range(len(samples)))
        if epoch:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        shuffled = samples[torch.tensor(order, dtype=torch.int64)]
        parts += [shuffled[number::count] for number in range(count)]
    return parts
