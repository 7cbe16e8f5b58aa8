"""The same update without the trainer: a plain torch loop on packed rows, and TRL's step."""

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


class PlainPacked:
    """A trainer as written by hand, on packed rows: PPO's clipped loss, clipping, AdamW."""

    def __init__(
        self, model: PreTrainedModel, batch: TrainBatch, micros: list[MicroBatch], bf16: bool
    ) -> None:
        device = model.device
        self._model: Any = model.eval()
        self._cast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self._behaviour = batch.behaviour.to(device)
        self._advantage = (batch.rewards[batch.tokens.owner] - 0.5).float().to(device)
        self._micros = [micro.to(device) for micro in micros]
        self._masks = [Attention().express(micro.mask) for micro in self._micros]

    def __call__(self) -> None:
        for micro, mask in zip(self._micros, self._masks, strict=True):
            with self._cast:
                hidden = self._model.model(
                    input_ids=micro.input_ids,
                    position_ids=micro.position_ids,
                    attention_mask=mask,
                    use_cache=False,
                ).last_hidden_state
                logits = self._model.lm_head(hidden.flatten(0, 1)[micro.index]).float()
                logprobs = logits.log_softmax(-1).gather(-1, micro.targets.unsqueeze(-1))[:, 0]
                ratio = (logprobs - self._behaviour[micro.source]).exp()
                advantage = self._advantage[micro.source]
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
                gain = torch.minimum(ratio * advantage, clipped)
                (-gain.sum() / len(self._behaviour)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


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
