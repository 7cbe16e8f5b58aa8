"""The run, its model and data, the protection of its sockets, and its logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.services.config.keys import Section, key


class RunSection(Section):
    """The run, and the place of its results."""

    name: str = key("run", "name of the run; part of its id", min_length=1)
    dir: str = key("runs", "folder that receives <id>/ with all results")
    steps: int = key(100, "optimizer steps to train", ge=1)
    seed: int = key(0, "seed of sampling, shuffling and initialisation")
    broker: str = key("tcp://127.0.0.1:*", "address the buffer binds; port * picks a free one")
    advertise: str = key(
        "",
        "host name or address by which others reach this process, where it is not the one that "
        "is bound (containers); empty = the bound one, or this host's name",
    )
    broker_grace_s: float = key(60.0, "seconds without buffer until a process gives up", gt=0)

    @property
    def broker_given(self) -> bool:
        return self.broker != RunSection().broker


class ModelConfig(Section):
    """The policy."""

    path: str = key(
        "",
        "Hugging Face model directory, tokenizer included, or ORG/NAME or ORG/NAME@REVISION on the "
        "hub: a branch, tag or commit, else main. A run pins the commit",
    )
    trust_remote_code: bool = key(
        False,
        "run the Python code that the model brings for its tokenizer; code for the model itself "
        "is never run",
    )
    checked: list[str] = key([], "other architectures that umbra check-model found right")
    chat_template: str = key("", "file of a chat template instead of the model's own")
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template, such as enable_thinking = false"
    )
    parser: str = key(
        "auto",
        "how reasoning and tool calls are read: auto (by the chat template's family), none, a "
        "family's name, vllm/TOOLS or vllm/TOOLS+REASONING",
        min_length=1,
    )


class DataConfig(Section):
    """Prompts."""

    prompts: str = key(
        "",
        'JSONL or Parquet file, "datasets:NAME[:CONFIG][:SPLIT]" (Hugging Face), or '
        '"module:function", which returns an iterable of rows; every row has a "prompt"',
    )
    columns: dict[str, str] = key(
        {}, 'columns that have another name in the prompts, ours to theirs: { prompt = "question" }'
    )
    shuffle: bool = key(True, "shuffle again in every epoch")


class SecurityConfig(Section):
    """Keys of the run's processes."""

    keys: str = key(
        "",
        "folder of the run's keys, from `umbra keys`; empty = the folder keys in the run's "
        "folder (umbra up: in run.dir) if there is one",
    )
    insecure: bool = key(False, "let sockets that other machines can reach be bound without keys")


class LogConfig(Section):
    """Logging of every service."""

    level: Literal["debug", "info", "warning", "error"] = key("info", "least level")
    format: Literal["console", "json"] = key("console", "one line or one object")
    samples: int = key(
        4,
        "rollouts of each step, from the worst to the best, that are written as text to "
        "samples.jsonl in the run's folder; 0 = none",
        ge=0,
    )


START_S = 600.0  # for all processes of a run to start, besides what their weights take


class WeightHubConfig(Section):
    """Versions, arena and pushes."""

    listen: str = key(
        "tcp://127.0.0.1:*",
        "address the hub binds, with the next port for plane tcp; port * picks free ones",
    )
    plane: Literal["auto", "shm", "tcp", "nccl", "cuda_ipc"] = key(
        "auto", "how weights travel; auto = best that both sides have"
    )
    bucket_bytes: int = key(4 << 20, "bytes per bucket (one checksum each)", ge=1024)
    receive_bucket_bytes: int = key(
        4 << 20, "bytes per message over plane tcp, chosen by the receiver", ge=1024
    )
    connections: ClassVar[int] = 2  # of a receiver to one source over plane tcp
    delta: Literal["auto", "always", "off"] = key(
        "auto", "plane tcp sends lossless differences: over slow links, over all, never"
    )
    device: ClassVar[int] = 0  # index of the GPU that the hub and each relay use
    chunk_bytes: ClassVar[int] = 64 << 20  # of a broadcast over plane nccl; two in device memory
    slots: int = key(2, "versions held in the arena", ge=2)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "dtype of served weights; auto = bfloat16 from and to GPUs, float32 on CPUs"
    )
    deadline_s: float = key(
        30.0,
        "seconds a receiver may take per phase until it is dropped, besides those for its bytes "
        "(least_rate)",
        gt=0,
    )
    least_rate: ClassVar[float] = LEAST_RATE  # bytes per second; deadlines grow with bytes by it

    @property
    def pace(self) -> Pace:
        return Pace(self.deadline_s, self.least_rate)

    def first_version_s(self, nbytes: int) -> float:
        """Return the seconds to wait for a first version where the trainer has yet to start.

        The `nbytes` of the model are read, allocated `slots` times, written to one of these, and
        brought to the receiver.
        """
        return self.pace.after(START_S).limit_s((3 + self.slots) * nbytes)

    def dtype_on(self, kind: str) -> Literal["float32", "bfloat16", "float16"]:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if kind == "cuda" else "float32"

    def expected_on(self, kind: str) -> str:
        """Return the dtype that such a process must receive; "" for any.

        With "auto" trainer and receivers decide each for itself, and may differ.
        """
        return self.dtype_on(kind) if self.dtype == "auto" else ""


class BufferConfig(Section):
    """The broker: groups, batches, staleness and leases."""

    ports: tuple[int, int] = key((0, 0), "of data and events; 0 = any free one", ge=0, le=65535)
    group_size: int = key(8, "samples per prompt", ge=1)
    batch_groups: int = key(32, "groups per optimizer step", ge=1)
    run_ahead: int = key(1, "batches generation may be ahead; 0 = synchronous", ge=0)
    max_staleness: int = key(
        2, "bound on trainer version - version of a sample's oldest token", ge=0, le=65535
    )
    stale_policy: Literal["drop", "wait"] = key(
        "wait",
        "training waits so that no group gets past max_staleness, or one that does is dropped "
        "and replaced, which favours short answers",
    )
    oversample: int = key(0, "groups issued beyond those that batches need", ge=0)
    on_batch: Literal["continue", "interrupt"] = key(
        "continue",
        "samples under way when a batch is full: go on, or come back as partials, which go on at "
        "whichever generator asks first",
    )
    straggler_s: float = key(
        0.0,
        "seconds that a group's first sample waits for slow ones, until the group is trained "
        "without them; 0 = it waits for all",
        ge=0,
    )
    min_survivors: ClassVar[int] = 2  # without which a group waits nevertheless
    dynamic_sampling: bool = key(False, "replace groups whose rewards are all equal (DAPO)")
    max_filtered: int = key(256, "groups replaced in a row until one is trained on anyway", ge=1)
    max_failed_share: float = key(
        0.5,
        "the run ends when more than this share of the samples of the last batches failed for "
        "reasons of their own (a reward that raises, say); 1 = never",
        ge=0,
        le=1,
    )
    stages: list[Literal["reward", "ref_logp", "logp"]] = key(
        [], "scoring stages between generation and training, in order"
    )
    lease_s: float = key(30.0, "seconds without a renewal until a sample is taken back", gt=0)
    batch_lease_s: ClassVar[float] = 120.0  # that the trainer may hold a batch in silence
    max_attempts: int = key(5, "leases of one sample until it ends as failed", ge=1)
    dead_after_s: float = key(15.0, "seconds of silence until a member counts as dead", gt=0)
    stall_s: float = key(
        60.0,
        "seconds without progress until a member counts as stuck; a generator whose engine "
        "makes no token in ten times as many ends with exit code 6",
        gt=0,
    )
    store: str = key("", 'folder of the durable store; empty = <run dir>/store, or "memory"')
    store_max_bytes: int = key(8 << 30, "bytes in use until no group is issued", ge=64 << 20)

    @property
    def bound(self) -> int:
        """Return the greatest staleness that is trained on."""
        return self.max_staleness if self.run_ahead else 0

    @property
    def engine_stall_s(self) -> float:
        """Return the seconds an engine may be busy without a token before its generator ends.

        Or load one version, for which it has the seconds of its bytes at 20 MB/s besides.
        """
        return 10 * self.stall_s

    @property
    def heartbeat_s(self) -> float:
        """Return the seconds between heartbeats of a service; longer with many members."""
        return min(1.0, self.dead_after_s / 15)

    def faults(self) -> Iterator[str]:
        size, least = self.group_size, self.min_survivors
        if self.dynamic_sampling and size == 1:
            yield "buffer.dynamic_sampling replaces groups of one: set buffer.group_size to 2, say"
        if self.straggler_s and least > size:
            yield f"buffer.straggler_s needs buffer.group_size >= {least}: set straggler_s to 0"
        if self.on_batch == "interrupt" and self.bound == 0:
            yield (
                "buffer.on_batch = interrupt continues partials with newer weights: set "
                "buffer.run_ahead and max_staleness to 1 or more, or buffer.on_batch to continue"
            )
        if self.stale_policy == "wait" and self.oversample:
            yield "buffer.oversample needs stale_policy = drop: set that, or buffer.oversample to 0"
        for stage in sorted(set(self.stages)):
            if self.stages.count(stage) > 1:
                yield f"buffer.stages has {stage} twice"
