"""The critic: values for advantages, learned from the same batches beside everything else.

It learns a batch in a thread of its own while the policy's update is committed, published and the
next batch waited for; the next batch's values wait for it. Its ranks have a process group of their
own, so that its collectives and the policy's never meet in different orders.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from umbra.services.config import RunConfig
from umbra.services.modeling.packing import Cost, pack
from umbra.services.modeling.row_sizes import RowSizes
from umbra.services.process.files import DISK
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.checkpoints.parts import CheckpointPart, OptimizerState, Weights
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.values import value_loss
from umbra.services.trainer.ranks import Ranks
from umbra.services.trainer.sharding import clip_gradients
from umbra.services.trainer.value_model import OwnModel, PolicyHead, Values


class LearnedCritic:
    """A value model and its optimizer (AdamW, no weight decay).

    Args:
        source: gives values.
        config: its section is read, and whether prompts are shared.
        rows: of the policy.
        ranks: those of `source`, with a process group that nobody else uses.
        cost: by which their shares of a batch are equal; the policy's.
    """

    def __init__(
        self, source: Values, config: RunConfig, rows: RowSizes, ranks: Ranks, cost: Cost
    ) -> None:
        self._source = source
        self._config = config.critic
        self._share_prompts = config.trainer.share_prompts
        self._rows = rows
        self._ranks = ranks
        self._cost = cost
        self._optimizer = torch.optim.AdamW(
            source.parameters, lr=config.critic.learning_rate, weight_decay=0.0, fused=True
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-critic")
        self._learning: Future[Row] | None = None
        self._outcome: Row = {"critic/loss": None, "critic/grad_norm": None}

    def values(self, batch: TrainBatch) -> Tensor:
        """V before each learned token under all that was learned so far, float32 [M]."""
        self.settle()
        micros = pack(
            batch.tokens,
            pack_tokens=self._rows.pack_tokens,
            micro_tokens=self._rows.micro_tokens,
            share_prompts=self._share_prompts,
            rank=self._ranks.share,
            world=self._ranks.shares,
            cost=self._cost,
        )
        self._source.look(micros)
        return self._thread.submit(self._values, len(batch.behaviour)).result()

    def learn(self, batch: TrainBatch, values: Tensor, returns: Tensor) -> Row:
        """Begin to learn `returns`; `values` are those of this batch.

        The loss and the gradient's norm come a batch later, as this does not wait for them.
        """
        del batch  # `values` has looked at it
        spread = returns.var(correction=0)
        left = (returns - values.to(returns)).var(correction=0)
        row: Row = {
            "critic/value_mean": float(values.mean()),
            "critic/return_mean": float(returns.mean()),
            "critic/explained_variance": float(1 - left / spread) if spread > 0 else None,
        }
        row |= self.settle()
        self._learning = self._thread.submit(self._learn, values, returns.float())
        return row

    def settle(self) -> Row:
        """Wait until nothing is being learned; what came of the last batch."""
        if self._learning is not None:
            self._outcome = self._learning.result()
            self._learning = None
        return self._outcome

    def parts(self) -> dict[str, CheckpointPart]:
        """What a checkpoint has to hold of it."""
        module = self._source.module
        return {
            "critic": _Settled(self, module),
            "critic_optimizer": OptimizerState(self._optimizer, module),
        }

    def export(self, out: Path) -> Path:
        """Write it to directory `out`, whole or not at all; all ranks have to call it."""
        self.settle()
        keep = self._ranks.rank == 0
        scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        self._source.save(scratch, keep=keep)
        if keep:
            DISK.sync_tree(scratch)
            shutil.rmtree(out, ignore_errors=True)
            scratch.rename(out)
            DISK.sync_directory(out.parent)
        return out

    def close(self) -> None:
        """End its thread, after what it is learning."""
        self._thread.shutdown()

    @torch.no_grad()
    def _values(self, count: int) -> Tensor:
        values = torch.zeros(count)
        for source, own in self._source.passes():
            values[source] = own.cpu()
        return self._ranks.sum(values)

    def _learn(self, values: Tensor, returns: Tensor) -> Row:
        config, norms = self._config, 0.0
        total = torch.zeros(1, dtype=torch.float64)
        for _ in range(config.epochs):
            for source, now in self._source.passes():
                target, old = returns[source].to(now), values[source].to(now)
                loss = value_loss(now, target, old, config.value_clip).sum() / len(values)
                # FSDP takes the mean over the ranks; ours is a sum.
                (loss * self._ranks.world).backward()
                total += float(loss.detach())
            self._source.sync()
            norm = clip_gradients(self._source.parameters, config.max_grad_norm, self._ranks)
            if torch.isfinite(norm):
                self._optimizer.step()
            self._optimizer.zero_grad()
            norms += float(norm)
        loss = float(self._ranks.sum(total))
        return {"critic/loss": loss / config.epochs, "critic/grad_norm": norms / config.epochs}


class _Settled(Weights):
    """The weights once nothing is being learned; the optimizer's state is asked for after them."""

    def __init__(self, critic: LearnedCritic, module: nn.Module) -> None:
        super().__init__(module)
        self._critic = critic

    def tensors(self) -> dict[str, Tensor]:
        self._critic.settle()
        return super().tensors()


def open_critic(config: RunConfig, learner: Learner) -> LearnedCritic | None:
    """The configured critic, if the advantages need one.

    Raises:
        UsageError: it cannot be loaded.
    """
    if config.trainer.pieces.advantage != "gae":
        return None
    given = Path(config.critic.path) if config.critic.path else None
    apart, cost = learner.ranks.apart(), learner.operations.sequence
    if config.critic.kind == "head":
        return LearnedCritic(PolicyHead(given, learner, apart), config, learner.rows, apart, cost)
    model = OwnModel(
        given or Path(config.model.name),
        config.trainer,
        learner.device,
        apart,
        config.model.checked,
    )
    return LearnedCritic(model, config, learner.rows, apart, cost)
