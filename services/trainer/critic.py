"""The critic: a value model for advantages, learned from the same batches beside everything else.

With one rank it learns a batch in a thread while the policy's update is committed, published and
the next batch waited for; the next batch's values wait for it. With several ranks it learns where
it is called: collectives that two threads start reach the ranks in different orders, and hang.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.models import open_weights
from umbra.services.modeling.sequence_parallel import SequenceGroup, SequenceParallel
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.sharding import clip_gradients
from umbra.services.trainer.learner import Learner, bring_up
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.advantages import value_loss
from umbra.services.trainer.policy import read, written_whole
from umbra.services.trainer.snapshot import whole_weights

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A transformer and a head; one module, so that FSDP2 sees one forward pass.

    The head begins at 0, so that the first advantages are rewards.
    """

    def __init__(
        self, backbone: PreTrainedModel, attention: Attention, group: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.weight = nn.Parameter(torch.zeros(1, backbone.config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        self._attention = attention
        self._parallel = SequenceParallel(backbone, attention, group) if group else None

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the value before each learned token, float32 [N]."""
        if self._parallel is None:
            return self._values(micro, micro)
        share = self._parallel.share(micro)
        return share.join(self._parallel.run(share, partial(self._values, share.own, share.rows)))

    def _values(self, own: MicroBatch, rows: MicroBatch, **arguments: Any) -> Tensor:
        output: Any = self.backbone(
            input_ids=own.input_ids,
            position_ids=own.position_ids,
            attention_mask=self._attention.express(rows.mask),
            use_cache=False,
            **arguments,
        )
        hidden = output.last_hidden_state.flatten(0, 1)[own.index]
        with torch.autocast(hidden.device.type, enabled=False):  # which would round the values
            weight, bias = self.weight.float(), self.bias.float()
            return nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)


class Critic:
    """A value model, on the policy's device and ranks, and its optimizer (AdamW, no decay).

    Raises:
        UsageError: it cannot be loaded.
    """

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self._config, self._trainer = config.critic, config.trainer
        self._learner, self._ranks, self._device = learner, learner.ranks, learner.device
        path = config.critic.path or config.model.path
        directory = check_model_dir(path, "critic.path", tokenizer=False)
        backbone, files = open_weights(AutoModel, directory, "critic.path", config.model.checked)
        attention = Attention.prepare(backbone, self._device)
        if attention.recurrent and learner.rows.pack_tokens > 1:
            raise UsageError(
                f"critic.path: layers of {directory} carry a state from token to token, so each "
                "sequence needs a row, and model.path packs several into one: choose one whose "
                "layers only attend"
            )
        self.model = ValueModel(backbone, attention, self._ranks.sequence)
        if (head := directory / HEAD_FILE).exists():  # else it begins as the policy
            self.model.load_state_dict(load_file(head), strict=False)
        bring_up(backbone, config.trainer, self._device, self._ranks, self.model)
        read(backbone, files)
        self.model.eval()
        self._parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.critic.learning_rate, weight_decay=0.0, fused=True
        )
        self._thread = worker(self._device) if self._ranks.world == 1 else None
        self.state = ModelState("critic", self.model, self._optimizer, settle=self.settle)
        self._micros: list[MicroBatch] = []
        self._learning: Future[Row] | None = None
        self._outcome: Row = {"critic/loss": None, "critic/grad_norm": None}

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> Tensor:
        """Return V before each learned token under all that was learned so far, float32 [M]."""
        self.settle()
        self._micros = self._learner.pack(batch.tokens)
        values = torch.zeros(len(batch.behaviour))
        for micro in self._micros:
            values[micro.source] = self._pass(micro).cpu()
        return self._ranks.sum(values)

    def learn(self, values: Tensor, returns: Tensor) -> Row:
        """Begin to learn `returns` of the batch that `values` are of.

        The loss and the gradient's norm come a batch later, as this does not wait for them.
        """
        spread = returns.var(correction=0)
        residual = (returns - values.to(returns)).var(correction=0)
        row: Row = {
            "critic/value_mean": float(values.mean()),
            "critic/return_mean": float(returns.mean()),
            "critic/explained_variance": float(1 - residual / spread) if spread > 0 else None,
        }
        row |= self.settle()
        if self._thread is not None:
            self._learning = self._thread.submit(self._learn, values, returns.float())
        else:
            self._outcome = self._learn(values, returns.float())
        return row

    def settle(self) -> Row:
        """Wait until nothing is being learned; return the metrics of the last batch."""
        learning, self._learning = self._learning, None
        if learning is not None:
            self._outcome = learning.result()
        return self._outcome

    def export(self, out: Path) -> Path:
        """Write it to directory `out`, whole or not at all; all ranks have to call it."""
        self.settle()
        weights = whole_weights(self.model, self._ranks)
        if self._ranks.rank == 0:
            head = {name: weights.pop(name) for name in ("weight", "bias")}
            bare = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
            with written_whole(out) as scratch:
                transformers_logging.disable_progress_bar()
                self.model.backbone.save_pretrained(scratch, state_dict=bare)
                save_file(head, scratch / HEAD_FILE)
        return out

    def close(self) -> None:
        """End its thread after the present update."""
        if self._thread is not None:
            self._thread.shutdown()

    def _pass(self, micro: MicroBatch) -> Tensor:
        bf16 = self._trainer.precision_on(self._device.type) == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            return self.model(micro.to(self._device))

    def _learn(self, values: Tensor, returns: Tensor) -> Row:
        total = torch.zeros(1, dtype=torch.float64)
        for micro in self._micros:
            values_now = self._pass(micro)
            target, old = returns[micro.source].to(values_now), values[micro.source].to(values_now)
            loss = value_loss(values_now, target, old, self._config.value_clip).sum() / len(values)
            # FSDP takes the mean over the ranks; ours is a sum.
            (loss * self._ranks.world).backward()
            total += float(loss.detach())
        norm = clip_gradients(self._parameters, self._trainer.max_grad_norm, self._ranks)
        if torch.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return {"critic/loss": float(self._ranks.sum(total)), "critic/grad_norm": float(norm)}


def worker(device: torch.device) -> ThreadPoolExecutor:
    """Return a thread that computes on `device`; CUDA's current device is a thread's own."""
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    return ThreadPoolExecutor(1, "umbra-critic", begin)


def open_critic(config: RunConfig, learner: Learner) -> Critic | None:
    return Critic(config, learner) if config.trainer.pieces.needs_critic else None
