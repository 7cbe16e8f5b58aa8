"""The run's configuration: one typed tree, filled from defaults < TOML file < environment < flags.

Each section belongs to one service, and that service's flags are generated from it (`command.py`),
so that file, environment and command line can't drift apart. Field descriptions are the
documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: typed, immutable, unknown keys are refused."""


class Run(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is run, and where its results go."""

    name: Annotated[str, Meta(description="name of the run; part of its id", min_length=1)] = "run"
    dir: Annotated[str, Meta(description="folder that receives <id>/ with all results")] = "runs"
    steps: Annotated[int, Meta(description="optimizer steps to train", ge=1)] = 100
    seed: Annotated[int, Meta(description="seed of sampling, shuffling and initialisation")] = 0
    broker: Annotated[
        str, Meta(description="address the buffer binds; port * picks a free one")
    ] = "tcp://127.0.0.1:*"
    broker_grace_s: Annotated[
        float, Meta(description="seconds without the buffer until a process gives up", gt=0)
    ] = 60.0


class Model(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy."""

    path: Annotated[str, Meta(description="Hugging Face model directory, tokenizer included")] = ""


class Data(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts."""

    prompts: Annotated[
        str,
        Meta(
            description='JSONL or Parquet file, or "datasets:NAME:SPLIT" (Hugging Face); every row '
            'has a "prompt"'
        ),
    ] = ""
    sources: Annotated[
        dict[str, float],
        Meta(description="several sources instead of data.prompts, each with its weight"),
    ] = {}
    shuffle: Annotated[bool, Meta(description="shuffle anew in every epoch")] = True
    curriculum: Annotated[
        str,
        Meta(
            description='"module:function" that is called with (rows, epoch) and returns the '
            "indices of the rows to draw in that epoch, in order; instead of data.shuffle"
        ),
    ] = ""


class Environment(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollout interacts with, and what rewards it."""

    kind: Annotated[
        str, Meta(description='"exact", "guess", "reward" or a class as "module:Class"')
    ] = "exact"
    reward: Annotated[
        str, Meta(description='reward function as "module:function", for kind "reward"')
    ] = ""
    timeout_s: Annotated[float, Meta(description="seconds a reward may take", gt=0)] = 30.0
    options: Annotated[
        dict[str, Any], Meta(description="passed to the environment's constructor")
    ] = {}


class SamplingConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the generators draw tokens."""

    temperature: Annotated[float, Meta(description="softmax temperature", gt=0)] = 1.0
    top_p: Annotated[float, Meta(description="nucleus mass; 1 = off", gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(description="most likely tokens kept; 0 = all", ge=0)] = 0
    min_p: Annotated[float, Meta(description="floor relative to the top token", ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(description="tokens generated per turn at most", ge=1)] = 256


class Buffer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker: groups, batches, staleness and leases."""

    group_size: Annotated[int, Meta(description="samples per prompt", ge=1)] = 8
    batch_groups: Annotated[int, Meta(description="groups per optimizer step", ge=1)] = 32
    run_ahead: Annotated[
        int, Meta(description="batches generation may be ahead; 0 = synchronous", ge=0)
    ] = 1
    max_staleness: Annotated[
        int, Meta(description="bound on trainer version - version of a sample's oldest token", ge=0)
    ] = 2
    stale_policy: Annotated[
        Literal["drop", "restart", "wait"],
        Meta(
            description="what is past max_staleness: its group is dropped and replaced, its stale "
            "samples are generated anew, or training waits so that nothing gets there"
        ),
    ] = "drop"
    partial_policy: Annotated[
        Literal["restart", "drop"],
        Meta(description="a partial past a limit: its sample starts anew, or its group is dropped"),
    ] = "restart"
    partial_max_segments: Annotated[
        int, Meta(description="times a sample may come back unfinished; 0 = any number", ge=0)
    ] = 0
    partial_max_age_s: Annotated[
        float, Meta(description="seconds from the first token of a partial; 0 = any age", ge=0)
    ] = 0.0
    oversample: Annotated[
        int, Meta(description="groups issued beyond those that batches need", ge=0)
    ] = 0
    on_batch: Annotated[
        Literal["continue", "interrupt", "cut"],
        Meta(
            description="samples under way when a batch is full: go on, come back as partials to "
            "go on later, or (cut) the oversampled groups that lag behind are cancelled"
        ),
    ] = "continue"
    straggler: Annotated[
        Literal["wait", "survivors"],
        Meta(description="a group with slow samples waits, or is trained without them"),
    ] = "wait"
    straggler_s: Annotated[
        float, Meta(description="seconds that a group's first sample waits for the rest", gt=0)
    ] = 60.0
    min_survivors: Annotated[
        int, Meta(description="samples without which a group waits nevertheless", ge=1)
    ] = 2
    dynamic_sampling: Annotated[
        bool, Meta(description="replace groups whose rewards are all equal (DAPO)")
    ] = False
    max_filtered: Annotated[
        int, Meta(description="groups replaced in a row until one is trained on anyway", ge=1)
    ] = 256
    prompt_attempts: Annotated[
        int,
        Meta(
            description="failed or filtered groups of a prompt until it is drawn no more; 0 = any",
            ge=0,
        ),
    ] = 0
    sampling: Annotated[
        Literal["fifo", "freshest"],
        Meta(description="groups of a batch: first complete first, or newest tokens first"),
    ] = "fifo"
    batch_tokens: Annotated[
        int,
        Meta(
            description="response tokens that fill a batch, batch_groups being the most groups; "
            "0 = always batch_groups",
            ge=0,
        ),
    ] = 0
    stages: Annotated[
        list[Literal["reward", "ref_logp", "logp"]],
        Meta(description="scoring stages between generation and training, in order"),
    ] = []
    score_lease_s: Annotated[
        float, Meta(description="seconds without a renewal until a scorer loses a sample", gt=0)
    ] = 60.0
    score_attempts: Annotated[
        int, Meta(description="attempts to score a sample until it ends as failed", ge=1)
    ] = 3
    lease_s: Annotated[
        float, Meta(description="seconds without a renewal until a sample is taken back", gt=0)
    ] = 30.0
    batch_lease_s: Annotated[
        float, Meta(description="seconds the trainer may hold a batch without a heartbeat", gt=0)
    ] = 120.0
    max_attempts: Annotated[
        int, Meta(description="leases of one sample until it ends as failed", ge=1)
    ] = 5
    heartbeat_s: Annotated[
        float, Meta(description="seconds between heartbeats of every service", gt=0)
    ] = 1.0
    dead_after_s: Annotated[
        float, Meta(description="seconds of silence until a member counts as dead", gt=0)
    ] = 15.0
    stall_s: Annotated[
        float, Meta(description="seconds without progress until a member counts as stuck", gt=0)
    ] = 60.0
    store: Annotated[
        str,
        Meta(description='folder of the durable store; empty = <run dir>/store, or "memory"'),
    ] = ""
    store_max_bytes: Annotated[
        int, Meta(description="disk space of the store; no new groups beyond it", ge=64 << 20)
    ] = 8 << 30


class Generator(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inference side."""

    count: Annotated[int, Meta(description="generator processes that `umbra up` starts", ge=1)] = 1
    engine: Annotated[Literal["torch"], Meta(description="inference engine")] = "torch"
    device: Annotated[str, Meta(description="cpu, cuda, cuda:1, ... or auto")] = "auto"
    slots: Annotated[int, Meta(description="sequences decoded at once", ge=1)] = 128
    max_context: Annotated[int, Meta(description="prompt + response tokens per slot", ge=8)] = 1024
    prefetch: Annotated[
        int, Meta(description="samples leased ahead of free slots, so that none stays empty", ge=0)
    ] = 32
    partial_flush_tokens: Annotated[
        int,
        Meta(
            description="tokens after which what there is of a sample is sent to the buffer, which "
            "so much is lost of at most; 0 = never",
            ge=0,
        ),
    ] = 512
    threads: Annotated[
        int, Meta(description="CPU threads of the engine; 0 = torch's choice", ge=0)
    ] = 0
    kv_policy: Annotated[
        Literal["keep", "recompute", "abort"],
        Meta(description="what new weights do to sequences under way"),
    ] = "keep"
    receive: Annotated[
        Literal["staged", "streamed"],
        Meta(description="hold new weights beside the old ones, or load them from the hub's host"),
    ] = "staged"


class Trainer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer and its objective."""

    learning_rate: Annotated[float, Meta(description="peak learning rate", gt=0)] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], Meta(description="decay after the warm-up")
    ] = "constant"
    final_lr_ratio: Annotated[
        float, Meta(description="learning rate at the last step over the peak", ge=0, le=1)
    ] = 0.05
    warmup_steps: Annotated[int, Meta(description="steps of linear warm-up", ge=0)] = 5
    betas: Annotated[tuple[float, float], Meta(description="AdamW betas")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(description="AdamW weight decay", ge=0)] = 0.0
    max_grad_norm: Annotated[float, Meta(description="gradient clipping", gt=0)] = 1.0
    objective: Annotated[
        Literal["ppo", "tis", "decoupled", "naive"],
        Meta(description="policy loss: clip against behaviour logprobs, TIS, decoupled PPO, naive"),
    ] = "ppo"
    advantage: Annotated[
        Literal["dr_grpo", "grpo"], Meta(description="reward - group mean, or that over the std")
    ] = "dr_grpo"
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "constant"],
        Meta(description="mean over tokens, over sequences, or sum over a constant length"),
    ] = "token_mean"
    clip_low: Annotated[float, Meta(description="ratio clip below: 1 - clip_low", gt=0)] = 0.2
    clip_high: Annotated[float, Meta(description="ratio clip above: 1 + clip_high", gt=0)] = 0.2
    is_cap: Annotated[
        float, Meta(description="cap of importance weights (tis, decoupled)", gt=0)
    ] = 2.0
    minibatches: Annotated[int, Meta(description="optimizer updates per batch", ge=1)] = 1
    pack_tokens: Annotated[int, Meta(description="tokens per packed row", ge=8)] = 256
    micro_tokens: Annotated[int, Meta(description="tokens per forward pass", ge=8)] = 4096
    device: Annotated[str, Meta(description="cpu, cuda or auto")] = "auto"
    precision: Annotated[
        Literal["no", "bf16", "fp16"], Meta(description="Accelerate mixed precision")
    ] = "no"
    threads: Annotated[int, Meta(description="CPU threads; 0 = torch's choice", ge=0)] = 0
    batch_wait_s: Annotated[
        float, Meta(description="seconds to wait for a batch until the run fails", gt=0)
    ] = 600.0


class WeightHub(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions, arena and pushes."""

    listen: Annotated[str, Meta(description="address the hub binds; port * picks a free one")] = (
        "tcp://127.0.0.1:*"
    )
    plane: Annotated[
        Literal["auto", "shm", "tcp", "nccl", "cuda_ipc"],
        Meta(description="how weights travel; auto = best that both sides have"),
    ] = "auto"
    bucket_bytes: Annotated[
        int, Meta(description="bytes per bucket (one checksum each)", ge=1024)
    ] = 4 << 20
    receive_bucket_bytes: Annotated[
        int, Meta(description="bytes per message over plane tcp, chosen by the receiver", ge=1024)
    ] = 4 << 20
    buckets_listen: Annotated[
        str,
        Meta(description="address for plane tcp; empty = any port of the listen address's host"),
    ] = ""
    delta: Annotated[
        Literal["auto", "always", "off"],
        Meta(description="plane tcp sends lossless differences: over slow links, over all, never"),
    ] = "auto"
    anchor_every: Annotated[
        int, Meta(description="every so many versions all bytes are sent; 0 = only if needed", ge=0)
    ] = 50
    slots: Annotated[int, Meta(description="versions held in the arena", ge=2)] = 2
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="what is served")
    ] = "float32"
    deadline_s: Annotated[
        float, Meta(description="seconds a receiver may take per phase until it is dropped", gt=0)
    ] = 30.0


class Scorer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage worker: rewards, reference or proximal logprobs."""

    stage: Annotated[
        Literal["reward", "ref_logp", "logp"], Meta(description="what this process computes")
    ] = "reward"
    reward: Annotated[int, Meta(description="reward scorers that `umbra up` starts", ge=0)] = 1
    ref_logp: Annotated[int, Meta(description="the same for ref_logp", ge=0)] = 1
    logp: Annotated[int, Meta(description="the same for logp", ge=0)] = 1
    model: Annotated[
        str, Meta(description="directory of the reference model; empty = model.path")
    ] = ""
    capacity: Annotated[int, Meta(description="trajectories leased at once", ge=1)] = 32
    pack_tokens: Annotated[int, Meta(description="tokens per packed row", ge=8)] = 256
    micro_tokens: Annotated[int, Meta(description="tokens per forward pass", ge=8)] = 4096
    device: Annotated[str, Meta(description="cpu, cuda, cuda:1, ... or auto")] = "auto"
    threads: Annotated[int, Meta(description="CPU threads; 0 = torch's choice", ge=0)] = 0


class Eval(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy on held-out prompts: before and after the run (`umbra up`), and within it."""

    prompts: Annotated[str, Meta(description="JSONL file of held-out prompts; empty = no eval")] = (
        ""
    )
    samples: Annotated[int, Meta(description="samples drawn", ge=1)] = 1024
    greedy: Annotated[bool, Meta(description="also evaluate greedy decoding")] = False
    every: Annotated[
        int, Meta(description="steps between evaluations within the run; 0 = none", ge=0)
    ] = 0
    mode: Annotated[
        Literal["pause", "concurrent"],
        Meta(description="training waits for such an evaluation, or goes on beside it"),
    ] = "pause"
    run_samples: Annotated[int, Meta(description="samples of such an evaluation", ge=1)] = 128
    timeout_s: Annotated[
        float, Meta(description="seconds until such an evaluation ends unfinished", gt=0)
    ] = 300.0


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging of every service."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level")
    ] = "info"
    format: Annotated[Literal["console", "json"], Meta(description="one line or one object")] = (
        "console"
    )


class RunConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree: what a run file holds."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    environment: Environment = Environment()
    sampling: SamplingConfig = SamplingConfig()
    buffer: Buffer = Buffer()
    generator: Generator = Generator()
    trainer: Trainer = Trainer()
    weight_hub: WeightHub = WeightHub()
    scorer: Scorer = Scorer()
    eval: Eval = Eval()
    log: Log = Log()
