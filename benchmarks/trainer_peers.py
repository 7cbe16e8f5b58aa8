"""The same update without the trainer: a plain torch loop, packed or padded, and TRL's step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.records import Trajectory
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.policy import load_policy

ROWS = 16  # sequences of a padded micro-batch
CLIP = 0.2


class _Plain:
    """A trainer as written by hand: PPO's clipped loss, clipping, AdamW."""

    def __init__(self, model: PreTrainedModel, batch: TrainBatch, bf16: bool = False) -> None:
        self._model: Any = model.eval()
        self._device = model.device
        self._bf16 = bf16
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self._behaviour = batch.behaviour.to(self._device)
        self._advantage = (batch.rewards[batch.tokens.owner] - 0.5).float().to(self._device)

    def _learn(self, hidden: Tensor, index: Tensor, targets: Tensor, source: Tensor) -> None:
        """Backward of the loss of one micro-batch; `hidden` [R, L, H]."""
        logits = self._model.lm_head(hidden.flatten(0, 1)[index]).float()
        logprobs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        ratio = (logprobs - self._behaviour[source]).exp()
        advantage = self._advantage[source]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        (-gain.sum() / len(self._behaviour)).backward()

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)


class PlainPacked(_Plain):
    """Plain torch on rows that are packed already."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        micros: list[MicroBatch],
        bf16: bool = False,
    ) -> None:
        super().__init__(model, batch, bf16)
        self._micros = [micro.to(self._device) for micro in micros]
        self._masks = [Attention().express(micro.mask) for micro in self._micros]

    def __call__(self) -> None:
        for micro, mask in zip(self._micros, self._masks, strict=True):
            with self._autocast():
                hidden = self._model.model(
                    input_ids=micro.input_ids,
                    position_ids=micro.position_ids,
                    attention_mask=mask,
                    use_cache=False,
                ).last_hidden_state
                self._learn(hidden, micro.index, micro.targets, micro.source)
        self._step()


class PlainPadded(_Plain):
    """Plain torch, a sequence in each row, padded to the longest of its micro-batch."""

    def __init__(self, model: PreTrainedModel, batch: TrainBatch) -> None:
        super().__init__(model, batch)
        sequences = batch.tokens.ids.split(batch.tokens.lengths.tolist())
        offset = batch.tokens.lengths.cumsum(0) - batch.tokens.lengths
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for first in range(0, len(sequences), ROWS):
            part = sequences[first : first + ROWS]
            ids = torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True)
            lengths = torch.tensor([len(one) for one in part])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            owner = batch.tokens.owner
            source = ((owner >= first) & (owner < first + ROWS)).nonzero().squeeze(1)
            learned = batch.tokens.learned[source]
            within = learned - offset[owner[source]] - 1
            index = (owner[source] - first) * ids.shape[1] + within
            self._parts.append((ids, mask.long(), index, batch.tokens.ids[learned], source))

    def __call__(self) -> None:
        for ids, mask, index, targets, source in self._parts:
            hidden = self._model.model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state
            self._learn(hidden, index, targets, source)
        self._step()


class TrlStep:
    """TRL's GRPOTrainer: its loss on given samples, backward, clipping and its optimizer."""

    def __init__(self, directory: Path, load: list[Trajectory], out: Path) -> None:
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        warnings.simplefilter("ignore")
        model, tokenizer = load_policy(directory)
        group = sum(t.group_id == load[0].group_id for t in load)
        longest = max(t.response_tokens for t in load)
        config = GRPOConfig(
            output_dir=str(out / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=ROWS,
            num_generations=group,
            max_completion_length=longest,
            temperature=1.0,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
        )
        self._trainer: Any = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(ROWS)]}),
            processing_class=tokenizer,
        )
        self._trainer.create_optimizer()
        self._model = model.train()
        self._parts = [
            self._inputs(load[first : first + ROWS]) for first in range(0, len(load), ROWS)
        ]
        self._trainer.current_gradient_accumulation_steps = len(self._parts)

    def __call__(self) -> None:
        trainer = self._trainer
        for part in self._parts:
            trainer.accelerator.backward(trainer._compute_loss(self._model, part))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    @staticmethod
    def _inputs(load: list[Trajectory]) -> dict[str, Tensor]:
        """Return a micro-batch as TRL pads it: prompts on the left, responses on the right."""

        def table(rows: list[Any], left: bool) -> Tensor:
            width = max(map(len, rows))
            filled = np.zeros((len(rows), width), rows[0].dtype)
            for line, row in zip(filled, rows, strict=True):
                line[width - len(row) if left else 0 :][: len(row)] = row
            return torch.from_numpy(filled)

        prompts = [np.frombuffer(t.prompt_ids, "<i4").astype(np.int64) for t in load]
        responses = [np.frombuffer(t.response_ids, "<i4").astype(np.int64) for t in load]
        mask = table([np.ones_like(row) for row in responses], left=False)
        return {
            "prompt_ids": table(prompts, left=True),
            "prompt_mask": table([np.ones_like(row) for row in prompts], left=True),
            "completion_ids": table(responses, left=False),
            "completion_mask": mask,
            "advantages": torch.tensor([t.reward - 0.5 for t in load]),
            "old_per_token_logps": table(
                [np.frombuffer(t.logprobs, "<f4").copy() for t in load], left=False
            ),
            "num_items_in_batch": mask.sum(),
        }
