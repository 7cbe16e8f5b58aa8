"""Sections of the trainer (optimizer, value model, checkpoints, metrics) and of evaluations."""

from __future__ import annotations

from typing import ClassVar, Literal

from umbra.services.config.keys import Section, key
from umbra.services.config.objective import ObjectiveKeys


class TrainerConfig(ObjectiveKeys):
    """The optimizer and its objective."""

    learning_rate: float = key(1e-5, "peak learning rate", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "decay after the warm-up")
    warmup_steps: int = key(5, "steps of linear warm-up", ge=0)
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = key(
        "adamw",
        "AdamW; AdamW with moments in 8 bits (needs torchao); or SGD whose momentum is the first "
        "beta",
    )
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW betas")
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
    logits_mib: ClassVar[float] = 256.0  # of float32 logits at a time; more are computed twice
    share_prompts: bool = key(True, "compute a prompt once for all samples of it in a row")
    router_aux_loss_coef: float = key(
        0.0, "weight of the loss that balances experts; 0 = none", ge=0
    )
    router_replay: bool = key(
        False, "route tokens to the experts that the generator's engine chose"
    )
    device: str = key("auto", "cpu, cuda or auto")
    precision: Literal["auto", "no", "bf16", "fp16"] = key(
        "auto", "Accelerate mixed precision; auto = bf16 on a GPU, no on a CPU"
    )
    weights: Literal["float32", "bf16"] = key(
        "float32", "dtype of parameters; bf16 ones have float32 copies for the optimizer"
    )
    offload: Literal["none", "optimizer", "activations", "all"] = key(
        "none", "what is in host memory; all: also parameters and gradients of ranks"
    )
    threads: int = key(0, "CPU threads of a rank; 0 = its share", ge=0)
    ranks: int = key(1, "processes over which the policy is sharded (FSDP2)", ge=1)
    nodes: int = key(1, "hosts that the ranks are on, equally many on each", ge=1)
    replicas: int = key(
        1,
        "copies of the policy, each sharded over ranks / replicas neighbouring ranks (HSDP)",
        ge=1,
    )
    rendezvous: str = key("", "HOST:PORT of node 0 where the ranks of several hosts meet")
    rendezvous_timeout_s: ClassVar[float] = 600.0  # that the hosts wait for each other at the start
    sequence_parallel: int = key(
        1, "ranks that share the tokens of each row (Ulysses); divides ranks", ge=1
    )
    expert_parallel: int = key(
        1, "ranks that divide the experts of each layer; divides ranks", ge=1
    )
    rank_timeout_s: float = key(
        120.0, "seconds a rank may be silent until the others give up", gt=0
    )
    activation_checkpointing: bool | str = key(
        "auto",
        "recompute layers in the backward pass, to save memory: all (true), one of N ('every "
        "N'), or of all but products and attention ('selective'); auto = all on a GPU",
        pattern="^(auto|selective|every [1-9][0-9]*)$",
    )
    deterministic: bool = key(False, "only algorithms whose results are the same in every run")
    compile: bool = key(False, "torch.compile each layer")
    profile_steps: list[int] = key(
        [], "steps of which each rank writes a trace, to <run dir>/profile", ge=1
    )
    lora_rank: int = key(0, "train a LoRA adapter of this rank; 0 = all weights", ge=0)
    lora_alpha: float = key(32.0, "the adapter's output is scaled by lora_alpha / lora_rank", gt=0)
    lora_targets: list[str] = key(
        [], "names of the layers with an adapter; empty = all linear ones"
    )
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
    mismatch_every: ClassVar[int] = 20  # steps without a comparison until weights are kept aside
    max_skipped: ClassVar[int] = 10  # batches in a row without an update until the run ends

    def precision_on(self, kind: str) -> Literal["no", "bf16", "fp16"]:
        """Of the computation on a device of that `kind`: "cpu" or "cuda"."""
        if self.precision == "auto":
            return "bf16" if kind == "cuda" else "no"
        return self.precision

    def recomputes_on(self, kind: str) -> bool | str:
        """How layers are recomputed in the backward pass on a device of that `kind`."""
        chosen = self.activation_checkpointing
        return kind == "cuda" if chosen == "auto" else chosen

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates that a batch is meant for."""
        return self.minibatches * self.epochs


class CriticConfig(Section):
    """The value model of `trainer.advantage = "gae"` (preset `ppo_critic`)."""

    kind: Literal["model", "head"] = key(
        "model", "a model of its own, or a value head on the policy's hidden states"
    )
    path: str = key("", "directory it starts from, as an earlier run wrote it; empty = the policy")
    learning_rate: float = key(1e-5, "its learning rate", gt=0)
    value_clip: float = key(
        0.2, "how far a value may move for its loss, as in PPO; 0 = any distance", ge=0
    )
    warmup_steps: int = key(0, "first steps in which it alone learns, not the policy", ge=0)


class CheckpointConfig(Section):
    """Checkpoints of the trainer, in <run dir>/checkpoints."""

    every: int = key(20, "steps between checkpoints; the last step has one too; 0 = none", ge=0)
    keep: int = key(2, "newest checkpoints that are kept; each can be gone on from", ge=1)
    best_metric: str = key(
        "", "also keep the checkpoint whose step has the best value of this metric"
    )


class MetricsConfig(Section):
    """Metrics of the training steps; they are always in <run dir>/metrics.jsonl."""

    also: list[Literal["tensorboard", "wandb"]] = key(
        [],
        "also write them for TensorBoard, to <run dir>/tensorboard, or log them with Weights & "
        "Biases, whose variables WANDB_PROJECT and WANDB_MODE are read",
    )


class EvalConfig(Section):
    """Accuracy on held-out prompts: before and after the run (`umbra up`), and within it."""

    prompts: str = key("", "held-out prompts, as data.prompts; empty = no eval")
    columns: dict[str, str] = key({}, "columns of held-out prompts, as data.columns")
    samples: int = key(256, "samples drawn in each evaluation", ge=1)
    greedy: bool = key(False, "also evaluate greedy decoding")
    every: int = key(0, "steps between evaluations within the run; 0 = none", ge=0)
    at_start: bool = key(False, "evaluate the weights that the run begins with in the same way")
    mode: Literal["pause", "concurrent"] = key(
        "pause", "training waits for such an evaluation, or goes on beside it"
    )
    samples_per_prompt: int = key(
        1, "of them, within the run, those of one prompt: k of pass@k and mean@k", ge=1
    )
    timeout_s: ClassVar[float] = 1800.0  # until such an evaluation ends unfinished

    @property
    def within(self) -> bool:
        """Whether there are evaluations within the run."""
        return self.every > 0 or self.at_start
