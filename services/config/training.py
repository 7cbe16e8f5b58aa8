"""Sections of the trainer (optimizer, value model, checkpoints, metrics) and of evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from umbra.services.config.keys import Section, key
from umbra.services.config.presets import ObjectiveKeys

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
TRACKERS: tuple[Tracker, ...] = get_args(Tracker)


class TrainerConfig(ObjectiveKeys):
    """The optimizer and its objective."""

    learning_rate: float = key(1e-5, "peak learning rate", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "decay after the warm-up")
    warmup_steps: int = key(5, "steps of linear warm-up", ge=0)
    optimizer: Literal["adamw", "sgd"] = key(
        "adamw", "AdamW, or SGD with the first beta's momentum"
    )
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas", ge=0, lt=1)
    weight_decay: float = key(0.0, "weight decay", ge=0)
    max_grad_norm: float = key(1.0, "gradient clipping", gt=0)
    minibatches: int = key(1, "optimizer updates per pass over a batch", ge=1)
    epochs: int = key(1, "passes over each batch; those after the first in shuffled order", ge=1)
    pack_tokens: int | Literal["auto"] = key(
        "auto", "tokens per packed row; auto = room for several samples", ge=8
    )
    micro_tokens: int | Literal["auto"] = key(
        "auto", "tokens per forward pass; auto = what fits into memory", ge=8
    )
    logits_mib: ClassVar[float] = 256.0  # of float32 logits at a time, without gradient
    share_prompts: bool = key(True, "compute a prompt once for all samples of it in a row")
    router_aux_loss_coef: float = key(0.0, "weight of the experts' balance loss; 0 = none", ge=0)
    router_replay: bool = key(False, "route tokens to the experts that the engine chose")
    device: str = key("auto", "cpu, cuda or auto")
    precision: Literal["auto", "no", "bf16"] = key(
        "auto", "Accelerate mixed precision; auto = bf16 on a GPU, no on a CPU"
    )
    weights: Literal["float32", "bf16"] = key(
        "float32", "dtype of parameters; bf16 ones have float32 copies for the optimizer"
    )
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "state kept in host memory; all: also inputs of recomputed layers, and parameters and "
        "gradients of ranks",
    )
    threads: int = key(0, "CPU threads of a rank; 0 = its share of the cores", ge=0)
    ranks: int = key(1, "processes over which the policy is sharded (FSDP2)", ge=1)
    nodes: int = key(1, "hosts that the ranks are on, equally many on each", ge=1)
    rendezvous: str = key("", "HOST:PORT of node 0 where the ranks of several hosts meet")
    rendezvous_timeout_s: ClassVar[float] = 600.0  # that the hosts wait for each other at the start
    sequence_parallel: int = key(1, "ranks that share a row (Ulysses); divides ranks", ge=1)
    expert_parallel: int = key(1, "ranks that divide a layer's experts; divides ranks", ge=1)
    rank_timeout_s: float = key(120.0, "seconds of a rank's silence until others give up", gt=0)
    activation_checkpointing: bool | Literal["auto", "selective"] = key(
        "auto",
        "recompute layers in the backward pass, to save memory: all of it (true), or all but "
        "products and attention ('selective'); auto = true on a GPU",
    )
    deterministic: bool = key(False, "only algorithms whose results are the same in every run")
    compile: bool = key(False, "torch.compile each layer")
    profile_steps: list[int] = key([], "steps with a trace of each rank in <run dir>/profile", ge=1)
    lora_rank: int = key(0, "train a LoRA adapter of this rank; 0 = all weights", ge=0)
    lora_alpha: float = key(32.0, "the adapter's output is scaled by lora_alpha / lora_rank", gt=0)
    lora_targets: list[str] = key([], "layers with an adapter, by name; empty = all linear ones")
    lora_publish: Literal["merged", "adapter"] = key(
        "merged", "what generators get: weights with the adapter merged, or it alone"
    )
    # A token is left out of the loss if it is so many times as probable as when it was sampled.
    max_ratio: ClassVar[float] = 1e4
    max_mismatch: float = key(
        0.0,
        "bound on k3 between a generator and the trainer on equal weights, above which the run "
        "stops; 0 = by the coarsest format: 1e-4 float32, 0.002 fp16, 0.02 bf16, 0.1 fp8",
        ge=0,
    )
    mismatch_every: ClassVar[int] = 20  # steps until a generator is compared again; 0 = never
    max_skipped: ClassVar[int] = 10  # batches in a row without an update until the run ends

    def precision_on(self, kind: str) -> Literal["no", "bf16"]:
        if self.precision != "auto":
            return self.precision
        return "bf16" if kind == "cuda" else "no"

    def computes_in(self, kind: str) -> Literal["float32", "bfloat16"]:
        """Return the dtype of matrix products on a device of that kind."""
        return "float32" if self.precision_on(kind) == "no" else "bfloat16"

    def recomputes_on(self, kind: str) -> bool | Literal["selective"]:
        setting = self.activation_checkpointing
        return kind == "cuda" if setting == "auto" else setting

    def logits_bytes_on(self, kind: str) -> int:
        """Return the bytes of float32 logits at a time in a pass with gradient.

        Where there are more they are computed twice. With few at a time a GPU is slow: each chunk
        casts the output layer and adds to its gradient.
        """
        return int(self.logits_mib * 2**20) * (4 if kind == "cuda" else 1)

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.epochs

    def faults(self) -> Iterator[str]:
        yield from self.objective_faults()
        yield from self.rank_faults()
        yield from self.device_faults("cpu" if self.device == "cpu" else "cuda")
        if self.sequence_parallel > 1 and self.router_aux_loss_coef:
            yield "trainer.router_aux_loss_coef needs whole rows: set sequence_parallel to 1"
        for name in ("sequence_parallel", "expert_parallel"):
            if self.compile and getattr(self, name) > 1:
                yield f"trainer.compile cannot compile trainer.{name}'s exchanges: use one of them"
        if self.expert_parallel > 1 and self.lora_rank and not self.lora_targets:
            yield "trainer.expert_parallel divides no adapters of experts: set trainer.lora_targets"
        if self.lora_publish == "adapter" and not self.lora_rank:
            yield "trainer.lora_publish = adapter has none to publish: set trainer.lora_rank"

    def device_faults(self, kind: str) -> Iterator[str]:
        """Yield settings that a device of that `kind` cannot serve."""
        precision, recomputes = self.precision_on(kind), self.recomputes_on(kind)
        if self.weights == "bf16" and precision != "bf16":
            yield f"trainer.weights = bf16 needs trainer.precision = bf16, which is {precision}"
        if self.offload == "all" and not recomputes:
            yield "trainer.offload = all needs trainer.activation_checkpointing = true"
        if self.compile and recomputes == "selective":
            yield "trainer.compile needs trainer.activation_checkpointing = true, not selective"

    def rank_faults(self) -> Iterator[str]:
        """Yield settings that contradict the number of `ranks`."""
        ranks, nodes = self.ranks, self.nodes
        if ranks % nodes:
            yield f"trainer.nodes = {nodes} does not divide trainer.ranks = {ranks}: change one"
        for name in ("sequence_parallel", "expert_parallel"):
            size = getattr(self, name)
            if ranks % size:
                yield f"trainer.{name} = {size} does not divide trainer.ranks = {ranks}: change one"
            elif not ranks % nodes and (ranks // nodes) % size:
                yield (
                    f"trainer.{name} = {size} does not divide the {ranks // nodes} ranks of each "
                    "host (trainer.ranks / trainer.nodes): change one of them"
                )
        if self.rendezvous and nodes == 1:
            yield f"trainer.rendezvous = {self.rendezvous} has no effect: set trainer.nodes above 1"


class CriticConfig(Section):
    """The value model of `trainer.advantage = "gae"` (preset `ppo_critic`)."""

    path: str = key("", "directory it starts from, as an earlier run wrote it; empty = the policy")
    learning_rate: float = key(1e-5, "its learning rate", gt=0)
    value_clip: float = key(0.2, "how far a value may move for its loss (PPO); 0 = any", ge=0)
    warmup_steps: int = key(0, "first steps in which it alone learns, not the policy", ge=0)


class CheckpointConfig(Section):
    """Checkpoints of the trainer, in <run dir>/checkpoints."""

    every: int = key(20, "steps between checkpoints; the last step has one too; 0 = none", ge=0)
    keep: int = key(2, "newest checkpoints that are kept; a run can resume from each", ge=1)
    best_metric: str = key("", "metric whose best step's checkpoint is kept too")


class MetricsConfig(Section):
    """Metrics of the training steps; they are always in <run dir>/metrics.jsonl."""

    also: list[Tracker] = key(
        [],
        "also write them for TensorBoard, to <run dir>/tensorboard, or log them with a tracker, "
        "whose variables are read (WANDB_MODE, MLFLOW_TRACKING_URI, SWANLAB_PROJECT, ...)",
    )


class EvalConfig(Section):
    """Accuracy on held-out prompts: before the first step, every so many, and after the last."""

    prompts: str = key("", "held-out prompts, as data.prompts; empty = no eval")
    columns: dict[str, str] = key({}, "columns of held-out prompts, as data.columns")
    samples: int = key(256, "samples drawn in each evaluation", ge=1)
    every: int = key(0, "steps between evaluations; 0 = no more than at_ends says", ge=0)
    at_ends: bool = key(True, "evaluate the weights that the run begins with, and its last ones")
    mode: Literal["pause", "concurrent"] = key(
        "pause", "training waits for an evaluation, or goes on beside it"
    )
    samples_per_prompt: int = key(1, "samples of one prompt among them: k of pass@k", ge=1)
    timeout_s: ClassVar[float] = 1800.0  # until an evaluation ends unfinished

    def faults(self) -> Iterator[str]:
        samples, each = self.samples, self.samples_per_prompt
        if self.every and not self.prompts:
            yield "eval.every needs eval.prompts: name a file of held-out prompts"
        if self.prompts and samples % each:
            yield f"eval.samples = {samples} is no multiple of eval.samples_per_prompt = {each}"


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the learning rate of all updates of step number `step`, counted from 0, of `steps`.

    It rises linearly over `warmup_steps` to the peak, then stays there or falls towards 0, which it
    would reach a step after the last, in a straight line or half a cosine.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak * (1 - progress)
    return peak * (1 + math.cos(math.pi * progress)) / 2
