"""Sections of the trainer (optimizer, value model, checkpoints, metrics) and of evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.services.config.base import Section
from umbra.services.config.objective import ObjectiveKeys


class TrainerConfig(ObjectiveKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer and its objective."""

    learning_rate: Annotated[float, Meta(description="peak learning rate", gt=0)] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], Meta(description="decay after the warm-up")
    ] = "constant"
    final_lr_ratio: Annotated[
        float, Meta(description="learning rate at the last step over the peak", ge=0, le=1)
    ] = 0.05
    warmup_steps: Annotated[int, Meta(description="steps of linear warm-up", ge=0)] = 5
    optimizer: Annotated[
        Literal["adamw", "sgd", "muon"],
        Meta(
            description="AdamW; SGD whose momentum is the first beta; or Muon for the matrices of "
            "the layers and AdamW for all else"
        ),
    ] = "adamw"
    betas: Annotated[tuple[float, float], Meta(description="AdamW betas")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(description="weight decay", ge=0)] = 0.0
    max_grad_norm: Annotated[float, Meta(description="gradient clipping", gt=0)] = 1.0
    minibatches: Annotated[
        int, Meta(description="optimizer updates per pass over a batch", ge=1)
    ] = 1
    epochs: Annotated[
        int,
        Meta(description="passes over each batch; those after the first in shuffled order", ge=1),
    ] = 1
    pack_tokens: Annotated[
        Annotated[int, Meta(ge=8)] | Literal["auto"],
        Meta(description="tokens per packed row; auto = room for several samples"),
    ] = "auto"
    micro_tokens: Annotated[
        Annotated[int, Meta(ge=8)] | Literal["auto"],
        Meta(description="tokens per forward pass; auto = what fits into memory"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "sdpa", "segments", "flex", "varlen"],
        Meta(
            description="backend of attention over packed rows; auto = right for the device and "
            "the rows; flex and varlen need a GPU"
        ),
    ] = "auto"
    logits_mib: Annotated[
        float, Meta(description="MiB of float32 logits at a time; more are computed twice", gt=0)
    ] = 256.0
    share_prompts: Annotated[
        bool, Meta(description="compute a prompt once for all samples of it in a row")
    ] = True
    experts: Annotated[
        Literal["auto", "eager", "grouped_mm", "batched_mm"],
        Meta(description="how experts are computed: Transformers' name of it, or auto"),
    ] = "auto"
    router_aux_loss_coef: Annotated[
        float, Meta(description="weight of the loss that balances experts; 0 = none", ge=0)
    ] = 0.0
    router_replay: Annotated[
        bool, Meta(description="route tokens to the experts that the generator's engine chose")
    ] = False
    device: Annotated[str, Meta(description="cpu, cuda or auto")] = "auto"
    precision: Annotated[
        Literal["auto", "no", "bf16", "fp16"],
        Meta(description="Accelerate mixed precision; auto = bf16 on a GPU, no on a CPU"),
    ] = "auto"
    weights: Annotated[
        Literal["float32", "bf16"],
        Meta(description="dtype of parameters; bf16 ones have float32 copies for the optimizer"),
    ] = "float32"
    moments: Annotated[
        Literal["float32", "bf16", "8bit"], Meta(description="how AdamW keeps its moments")
    ] = "float32"
    offload: Annotated[
        Literal["none", "optimizer", "activations", "all"],
        Meta(description="what is in host memory; all: also parameters and gradients of ranks"),
    ] = "none"
    threads: Annotated[int, Meta(description="CPU threads of a rank; 0 = its share", ge=0)] = 0
    ranks: Annotated[
        int, Meta(description="processes over which the policy is sharded (FSDP2)", ge=1)
    ] = 1
    nodes: Annotated[
        int, Meta(description="hosts that the ranks are on, equally many on each", ge=1)
    ] = 1
    replicas: Annotated[
        int,
        Meta(
            description="copies of the policy, each sharded over ranks / replicas neighbouring "
            "ranks (HSDP)",
            ge=1,
        ),
    ] = 1
    rendezvous: Annotated[
        str, Meta(description="HOST:PORT of node 0 where the ranks of several hosts meet")
    ] = ""
    rendezvous_timeout_s: Annotated[
        float,
        Meta(description="seconds that the hosts wait for each other when they start", gt=0),
    ] = 600.0
    sequence_parallel: Annotated[
        int,
        Meta(description="ranks that share the tokens of each row (Ulysses); divides ranks", ge=1),
    ] = 1
    expert_parallel: Annotated[
        int,
        Meta(description="ranks that divide the experts of each layer; divides ranks", ge=1),
    ] = 1
    reshard_after_forward: Annotated[
        bool, Meta(description="gather a layer again for the backward pass instead of keeping it")
    ] = True
    reduce_gradients: Annotated[
        Literal["micro_batch", "update"],
        Meta(description="when ranks sum gradients; by update, each holds whole ones till then"),
    ] = "micro_batch"
    rank_timeout_s: Annotated[
        float, Meta(description="seconds a rank may be silent until the others give up", gt=0)
    ] = 120.0
    activation_checkpointing: Annotated[
        bool | Annotated[str, Meta(pattern=r"^(auto|selective|every [1-9][0-9]*)$")],
        Meta(
            description="recompute layers in the backward pass, to save memory: all (true), one of "
            "N ('every N'), or of all but products and attention ('selective'); auto = all on a GPU"
        ),
    ] = "auto"
    deterministic: Annotated[
        bool, Meta(description="only algorithms whose results are the same in every run")
    ] = False
    compile: Annotated[bool, Meta(description="torch.compile each layer")] = False
    profile_steps: Annotated[
        list[Annotated[int, Meta(ge=1)]],
        Meta(description="steps of which each rank writes a trace, to <run dir>/profile"),
    ] = []
    lora_rank: Annotated[
        int, Meta(description="train a LoRA adapter of this rank; 0 = all weights", ge=0)
    ] = 0
    lora_alpha: Annotated[
        float, Meta(description="the adapter's output is scaled by lora_alpha / lora_rank", gt=0)
    ] = 32.0
    lora_targets: Annotated[
        list[str], Meta(description="names of the layers with an adapter; empty = all linear ones")
    ] = []
    lora_publish: Annotated[
        Literal["merged", "adapter"],
        Meta(description="what generators get: weights with the adapter merged, or it alone"),
    ] = "merged"
    max_ratio: Annotated[
        float,
        Meta(
            description="a token is left out of the loss if its probability is more than so many "
            "times that with which it was generated; 0 = no bound",
            ge=0,
        ),
    ] = 1e4
    max_mismatch: Annotated[
        float,
        Meta(
            description="bound on k3 between a generator and the trainer on equal weights; 0 = by "
            "the coarsest format: 1e-4 float32, 0.002 fp16, 0.02 bf16, 0.1 fp8",
            ge=0,
        ),
    ] = 0.0
    on_mismatch: Annotated[Literal["stop", "warn"], Meta(description="what is done above it")] = (
        "stop"
    )
    mismatch_every: Annotated[
        int,
        Meta(
            description="steps without such a comparison until weights are kept aside (in host "
            "memory) for one of later samples; 0 = never",
            ge=0,
        ),
    ] = 20
    max_skipped: Annotated[
        int,
        Meta(description="batches in a row whose updates are left out until the run ends", ge=1),
    ] = 10
    batch_wait_s: Annotated[
        float, Meta(description="seconds to wait for a batch until the run fails", gt=0)
    ] = 600.0

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


class CriticConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value model of `trainer.advantage = "gae"` (preset `ppo_critic`)."""

    kind: Annotated[
        Literal["model", "head"],
        Meta(description="a model of its own, or a value head on the policy's hidden states"),
    ] = "model"
    path: Annotated[
        str,
        Meta(
            description="directory it starts from, as an earlier run wrote it; empty = the policy"
        ),
    ] = ""
    learning_rate: Annotated[float, Meta(description="its learning rate", gt=0)] = 1e-5
    epochs: Annotated[int, Meta(description="passes over each batch", ge=1)] = 1
    value_clip: Annotated[
        float, Meta(description="how far a value may move for its loss, as in PPO; 0 = any", ge=0)
    ] = 0.2
    max_grad_norm: Annotated[float, Meta(description="clipping of its gradient", gt=0)] = 1.0
    warmup_steps: Annotated[
        int, Meta(description="first steps in which it alone learns, not the policy", ge=0)
    ] = 0


class CheckpointConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of the trainer, in <run dir>/checkpoints."""

    every: Annotated[
        int,
        Meta(description="steps between checkpoints; the last step has one too; 0 = none", ge=0),
    ] = 20
    keep: Annotated[
        int, Meta(description="newest checkpoints that are kept; each can be gone on from", ge=1)
    ] = 2
    best_metric: Annotated[
        str,
        Meta(description="also keep the checkpoint whose step has the best value of this metric"),
    ] = ""
    best_mode: Annotated[
        Literal["max", "min"], Meta(description="whether the highest or the lowest value is best")
    ] = "max"


class MetricsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metrics of the training steps; they are always in <run dir>/metrics.jsonl."""

    tensorboard: Annotated[
        bool, Meta(description="also write them for TensorBoard, to <run dir>/tensorboard")
    ] = False
    wandb: Annotated[
        Literal["off", "offline", "online"],
        Meta(description="also log them with Weights & Biases: in <run dir>/wandb, or online"),
    ] = "off"
    wandb_project: Annotated[str, Meta(description="project at Weights & Biases", min_length=1)] = (
        "umbra"
    )


class EvalConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy on held-out prompts: before and after the run (`umbra up`), and within it."""

    prompts: Annotated[
        str, Meta(description="held-out prompts, as data.prompts; empty = no eval")
    ] = ""
    columns: Annotated[
        dict[str, str], Meta(description="columns of held-out prompts, as data.columns")
    ] = {}
    samples: Annotated[int, Meta(description="samples drawn", ge=1)] = 1024
    greedy: Annotated[bool, Meta(description="also evaluate greedy decoding")] = False
    every: Annotated[
        int, Meta(description="steps between evaluations within the run; 0 = none", ge=0)
    ] = 0
    at_start: Annotated[
        bool, Meta(description="evaluate the weights that the run begins with in the same way")
    ] = False
    mode: Annotated[
        Literal["pause", "concurrent"],
        Meta(description="training waits for such an evaluation, or goes on beside it"),
    ] = "pause"
    run_samples: Annotated[int, Meta(description="samples of such an evaluation", ge=1)] = 128
    samples_per_prompt: Annotated[
        int, Meta(description="of them, those of one prompt: k of pass@k and mean@k", ge=1)
    ] = 1
    timeout_s: Annotated[
        float, Meta(description="seconds until such an evaluation ends unfinished", gt=0)
    ] = 300.0

    @property
    def within(self) -> bool:
        """Whether there are evaluations within the run."""
        return self.every > 0 or self.at_start
