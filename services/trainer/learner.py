"""The policy, its optimizer and its learning rate, as Accelerate prepared them."""

from __future__ import annotations

import math
import os

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.packing import MicroBatch
from umbra.services.modeling.scorer import Scorer
from umbra.services.runtime.config import Trainer
from umbra.services.trainer.metrics import Row


class Learner:
    """Scores micro-batches and updates the policy, on whatever device Accelerate chose.

    Args:
        model: the policy, float32.
        config: learning rate, schedule, clipping, device and precision are read.
        steps: length of the learning-rate schedule.

    Raises:
        UsageError: more than one rank, or a device that is not there.
    """

    def __init__(self, model: PreTrainedModel, config: Trainer, steps: int) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._steps = steps
        self._accelerator = Accelerator(cpu=_on_cpu(config), mixed_precision=config.precision)
        # No dropout: these must be the logprobs of the policy that generates.
        scorer = Scorer(model).eval()
        optimizer = torch.optim.AdamW(
            scorer.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._scorer, self._optimizer = self._accelerator.prepare(scorer, optimizer)
        self.device = self._accelerator.device

    @property
    def model(self) -> PreTrainedModel:
        """The bare policy, with the current weights."""
        return self._accelerator.unwrap_model(self._scorer).model

    def score(
        self,
        micro: MicroBatch,
        temperature: Tensor,
        *,
        with_entropy: bool = True,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs (with gradient) and entropies of the learned tokens, on the device; [N] each."""
        return self._scorer(
            micro.to(self.device),
            temperature.to(self.device),
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
        )

    @torch.no_grad()
    def logprobs(self, micros: list[MicroBatch], temperature: Tensor) -> Tensor:
        """Logprobs under the current weights, no gradient, float32 [M]; 0 for tokens not scored."""
        result = torch.zeros_like(temperature)
        for micro in micros:
            result[micro.source] = self.score(micro, temperature[micro.source], with_entropy=False)[
                0
            ].cpu()
        return result

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self._accelerator.backward(loss)

    def update(self, step: int) -> Row:
        """Clip the gradients, update the weights with the learning rate of `step`, start anew.

        An update whose gradient is not finite is left out and counted in `skipped`.
        """
        rate = learning_rate(self._config, step, self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = self._accelerator.clip_grad_norm_(
            self._scorer.parameters(), self._config.max_grad_norm
        )
        assert norm is not None
        finite = bool(torch.isfinite(norm))
        # With fp16 the gradient scaler has to see the overflow; it leaves the update out itself.
        if finite or self._config.precision == "fp16":
            self._optimizer.step()
        self._optimizer.zero_grad()
        return {
            "grad_norm": float(norm) if finite else None,
            "lr": rate,
            "skipped": float(not finite),
        }


def learning_rate(config: Trainer, step: int, steps: int) -> float:
    """The rate of update number `step`, counted from 0, of `steps`.

    It rises linearly over `warmup_steps` to the peak, then stays there or falls to
    `final_lr_ratio` of it at the last step, in a straight line or half a cosine.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    done = min(1.0, done)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


def _on_cpu(config: Trainer) -> bool:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise UsageError(
            f"WORLD_SIZE is {ranks}, but the trainer runs as one process: start it with "
            "`umbra trainer`, without torchrun or accelerate launch"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"trainer.device is {config.device!r}: use cpu, cuda or auto")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device is cuda, but torch sees no GPU: use cpu or auto")
    return config.device == "cpu" or not torch.cuda.is_available()
