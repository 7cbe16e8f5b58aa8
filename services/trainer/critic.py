"""The critic: values for advantages, learned from the same batches beside everything else.

It learns a batch in a thread of its own while the policy's update is committed, published and the
next batch waited for; the next batch's values wait for it. Its ranks have a process group of their
own.

On several GPUs it learns where it is called: NCCL may hang where the collectives of two groups are
enqueued by two threads, in one order on one rank and in another on the next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.packing import Cost, pack
from umbra.services.modeling.row_sizes import RowSizes
from umbra.services.modeling.sequence_parallel import SequenceGroup, SequenceParallel
from umbra.services.process.files import DISK
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.checkpoints.parts import CheckpointPart, OptimizerState, Weights
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.sharding import (
    clip_gradients,
    prepare_layers,
    shard,
)
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.advantages import value_loss
from umbra.services.trainer.policy import no_progress_bars, open_backbone, place, read
from umbra.services.trainer.snapshot import whole_weights

T = TypeVar("T")


class LearnedCritic:
    """A value model and its optimizer (AdamW, no weight decay).

    Args:
        source: gives values.
        config: its section is read, and whether prompts are shared.
        rows: of the policy.
        ranks: those of `source`, with a process group that nobody else uses.
        cost: by which their shares of a batch are equal; the policy's.
        device: that of `source`, with its number.
    """

    def __init__(
        self,
        source: Values,
        config: RunConfig,
        rows: RowSizes,
        ranks: Ranks,
        cost: Cost,
        device: torch.device,
    ) -> None:
        self._source = source
        self._config = config.critic
        self._share_prompts = config.trainer.share_prompts
        self._max_grad_norm = config.trainer.max_grad_norm
        self._rows = rows
        self._ranks = ranks
        self._cost = cost
        self._optimizer = torch.optim.AdamW(
            source.parameters, lr=config.critic.learning_rate, weight_decay=0.0, fused=True
        )
        gpu = device.type == "cuda"
        self._apart = not (gpu and ranks.world > 1)
        # CUDA's current device is a thread's own, and begins as GPU 0.
        begin = partial(torch.cuda.set_device, device) if gpu else None
        self._thread = ThreadPoolExecutor(1, "umbra-critic", begin)
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
        return self._run(self._values, len(batch.behaviour)).result()

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
        self._learning = self._run(self._learn, values, returns.float())
        return row

    def settle(self) -> Row:
        """Wait until nothing is being learned; what came of the last batch."""
        if self._learning is not None:
            self._outcome = self._learning.result()
            self._learning = None
        return self._outcome

    def _run(self, work: Callable[..., T], *of: Any) -> Future[T]:
        """Begin `work`; on several GPUs it is done on return."""
        if self._apart:
            return self._thread.submit(work, *of)
        done: Future[T] = Future()
        done.set_result(work(*of))
        return done

    def parts(self) -> dict[str, CheckpointPart]:
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
        total = torch.zeros(1, dtype=torch.float64)
        for source, now in self._source.passes():
            target, old = returns[source].to(now), values[source].to(now)
            loss = value_loss(now, target, old, self._config.value_clip).sum() / len(values)
            # FSDP takes the mean over the ranks; ours is a sum.
            (loss * self._ranks.world).backward()
            total += float(loss.detach())
        self._source.sync()
        norm = clip_gradients(self._source.parameters, self._max_grad_norm, self._ranks)
        if torch.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return {"critic/loss": float(self._ranks.sum(total)), "critic/grad_norm": float(norm)}


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
    apart = learner.ranks.apart()
    if config.critic.kind == "head":
        source: Values = PolicyHead(given, learner, apart)
    else:
        source = OwnModel(
            given or Path(config.model.name),
            config.trainer,
            learner.device,
            apart,
            config.model.checked,
        )
    cost = learner.operations.sequence
    return LearnedCritic(source, config, learner.rows, apart, cost, learner.device)


HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """One number of a hidden state; it begins at 0, so that the first advantages are rewards.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(-1)

    def load(self, directory: Path) -> None:
        """Start from what `directory` holds of an earlier run, if it holds a head.

        Raises:
            UsageError: the head is of another width.
        """
        if not (directory / HEAD_FILE).exists():
            return
        stored = load_file(directory / HEAD_FILE)
        if stored["weight"].shape != self.weight.shape:
            raise UsageError(
                f"critic.path: the value head in {directory} has {stored['weight'].shape[1]} "
                f"inputs, but the model has {self.weight.shape[1]}: it belongs to another model"
            )
        self.load_state_dict(stored)


class Values(Protocol):
    """A source of values that learns."""

    parameters: list[nn.Parameter]

    @property
    def module(self) -> nn.Module: ...

    def look(self, micros: list[MicroBatch]) -> None:
        """The batch that is asked about next; called where the policy may run."""
        ...

    def passes(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Of each micro-batch: which learned tokens [N], and their values with gradient [N]."""
        ...

    def sync(self) -> None:
        """Have the mean of the ranks' gradients in all of them, if the passes did not see to it."""
        ...

    def save(self, directory: Path, *, keep: bool) -> None:
        """Write it; all ranks have to call it, and one `keep`s it."""
        ...


class ValueModel(nn.Module):
    """A transformer of its own and a head; it is a module so that FSDP2 sees one forward pass."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: ValueHead,
        attention: Attention,
        group: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self._attention = attention
        self._parallel = SequenceParallel(backbone, attention, group) if group else None

    def forward(self, micro: MicroBatch) -> Tensor:
        if self._parallel is None:
            return self._values(micro, micro)
        share = self._parallel.share(micro)
        values = self._values(share.own, share.rows, **share.arguments())
        self._parallel.check(share)
        return share.join(values)

    def _values(self, own: MicroBatch, rows: MicroBatch, **arguments: Any) -> Tensor:
        output: Any = self.backbone(
            input_ids=own.input_ids,
            position_ids=own.position_ids,
            attention_mask=self._attention.express(rows.mask),
            use_cache=False,
            **arguments,
        )
        return self.head(output.last_hidden_state.flatten(0, 1)[own.index])


class OwnModel:
    """Values by a model of its own, sharded over the ranks like the policy.

    Args:
        directory: a policy, or what `save` wrote.
        config: precision and layers, as the policy's.
        device: where it computes.
        ranks: who shares the work, with a process group that nobody else uses.
        checked: see `check_architecture`.

    Raises:
        UsageError: it cannot be loaded.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainerConfig,
        device: torch.device,
        ranks: Ranks,
        checked: Collection[str] = (),
    ) -> None:
        backbone, files = open_backbone(directory, "critic.path", checked)
        head = ValueHead(backbone.config.hidden_size)
        head.load(directory)
        prepare_layers(backbone, config, device.type)
        precision = config.precision_on(device.type)
        attention = Attention.prepare(backbone, device)
        self._model = ValueModel(backbone, head, attention, ranks.sequence)
        if ranks.world > 1:
            shard(backbone, device, ranks, config, root=self._model)
        on_host = ranks.world > 1 and config.offload == "all"
        rows_at = torch.device("cpu") if on_host else device
        place(self._model, device, parameters_at=rows_at)
        if files is not None:
            read(backbone, files)
        self._model.eval()
        self._ranks = ranks
        self._device = device
        self._bf16 = precision == "bf16"
        self._micros: list[MicroBatch] = []
        self.parameters = list(self._model.parameters())

    @property
    def module(self) -> nn.Module:
        return self._model

    def look(self, micros: list[MicroBatch]) -> None:
        self._micros = micros

    def passes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for micro in self._micros:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                values = self._model(micro.to(self._device))
            yield micro.source, values

    def sync(self) -> None:
        """FSDP has reduced the gradients in the backward passes."""

    def save(self, directory: Path, *, keep: bool) -> None:
        """The backbone as a Hugging Face directory, and the head."""
        weights = whole_weights(self._model, self._ranks)
        if not keep:
            return
        head = {name: weights.pop(f"head.{name}") for name in ("weight", "bias")}
        bare = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
        with no_progress_bars():
            self._model.backbone.save_pretrained(directory, state_dict=bare)
        save_file(head, directory / HEAD_FILE)


class PolicyHead:
    """Values by a head on the policy's last hidden states, through which no gradient goes back.

    Args:
        directory: what `save` wrote, or None.
        learner: the policy.
        ranks: as for `OwnModel`.

    Raises:
        UsageError: the head belongs to another model.
    """

    def __init__(self, directory: Path | None, learner: Learner, ranks: Ranks) -> None:
        self._head = ValueHead(learner.model.config.hidden_size)
        if directory is not None:
            self._head.load(directory)
        self._head.to(learner.device)
        self._learner = learner
        self._ranks = ranks
        self._seen: list[tuple[Tensor, Tensor]] = []
        self.parameters = list(self._head.parameters())

    @property
    def module(self) -> nn.Module:
        return self._head

    def look(self, micros: list[MicroBatch]) -> None:
        """One forward pass of the policy; its hidden states at learned tokens are kept."""
        self._seen = [(micro.source, self._learner.hidden(micro)) for micro in micros]

    def passes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for source, hidden in self._seen:
            yield source, self._head(hidden)

    def sync(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(self._ranks.sum(parameter.grad.cpu()) / self._ranks.world)

    def save(self, directory: Path, *, keep: bool) -> None:
        if keep:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(
                {k: v.cpu() for k, v in self._head.state_dict().items()}, directory / HEAD_FILE
            )
