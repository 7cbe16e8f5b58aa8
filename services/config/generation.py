"""Sections of rollouts: environment, sampling, generators and scorers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from umbra.services.config.base import Section

ENVIRONMENT = "environment"
"""The field of a prompt row that names its environment, in a run with several."""


def environment_prefix(name: str) -> str:
    """What the ids of an environment's prompts begin with, in a run with several."""
    return f"{name}/"


LIBRARIES = ("verifiers", "openenv", "trl")
"""Kinds of environments that other libraries define; programs of ours play them."""
JUDGED_AT_ONCE = ("exact", "numeric", "math", "reasoning-gym", "reward")
"""Kinds whose one step is the reward."""


class EnvironmentConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rollout interacts with, and what rewards it."""

    kind: Annotated[
        str,
        Meta(
            description='"exact", "numeric", "math", "guess", "tools", "reasoning-gym", "reward", '
            '"agent", "verifiers", "openenv", "trl" or a class as "module:Class"'
        ),
    ] = "exact"
    reward: Annotated[
        str, Meta(description='reward function as "module:function", for kinds "reward" and "trl"')
    ] = ""
    rewards: Annotated[
        dict[str, float],
        Meta(
            description="several such functions, each with its weight, for kinds reward and trl; "
            "their values are parts of the reward"
        ),
    ] = {}
    reward_scope: Annotated[
        Literal["sample", "group"],
        Meta(
            description="what a function with the parameter completions is called with: one "
            "sample, or (group; kind reward, scorers do it) all samples of a prompt's group at once"
        ),
    ] = "sample"
    id: Annotated[
        str,
        Meta(
            description='for kind "verifiers": name of the environment or taskset; "openenv": URL '
            'of a server, or its app as "module:app"; "trl": class as "module:Class"'
        ),
    ] = ""
    agent: Annotated[
        str,
        Meta(
            description='agent as "module:function", for kind "agent"; empty = agents come to '
            "generator.serve"
        ),
    ] = ""
    run_on: Annotated[
        Literal["generator", "env_worker"],
        Meta(
            description="whose host runs agents and environments of other libraries: the "
            "generator's, or that of an env-worker"
        ),
    ] = "generator"
    timeout_s: Annotated[
        float,
        Meta(
            description="seconds that one step of the environment may take, or that a program that "
            "asks for turns may be silent for between two of them",
            gt=0,
        ),
    ] = 30.0
    reset_s: Annotated[
        float,
        Meta(
            description="seconds that a conversation's opening may take, or a program until it "
            "asks for its first turn; 0 = timeout_s",
            ge=0,
        ),
    ] = 0.0
    score_s: Annotated[
        float,
        Meta(
            description="seconds that a reward may take: of kinds that judge at once, and of a "
            "program that says that it judges; 0 = timeout_s",
            ge=0,
        ),
    ] = 0.0
    setup_s: Annotated[
        float,
        Meta(
            description="seconds that a process for user code may take to start: its imports, and "
            "what it loads",
            gt=0,
        ),
    ] = 120.0
    max_turns: Annotated[int, Meta(description="turns of the model; 0 = any number", ge=0)] = 0
    max_tokens: Annotated[
        int,
        Meta(description="response tokens of all turns, the environment's included; 0 = any", ge=0),
    ] = 0
    max_s: Annotated[
        float, Meta(description="seconds that a sample may take on one generator; 0 = any", ge=0)
    ] = 0.0
    workers: Annotated[
        int,
        Meta(description="processes that run user code, per generator, scorer or env-worker", ge=1),
    ] = 4
    memory_mb: Annotated[
        int, Meta(description="MiB of address space of such a process; 0 = any", ge=0)
    ] = 4096
    sandbox: Annotated[
        str,
        Meta(
            description='where a model\'s code runs: "docker", "podman" or a class as '
            '"module:Class"; empty = there are no tools that run code'
        ),
    ] = ""
    sandbox_options: Annotated[
        dict[str, Any],
        Meta(description="image and limits of its containers, or the class's arguments"),
    ] = {}
    agent_sampling: Annotated[
        Literal["override", "refuse"],
        Meta(
            description="an agent that asks for another sampling than the run's gets the run's, "
            "which is counted, or is refused"
        ),
    ] = "override"
    branches: Annotated[
        Literal["refuse", "train"],
        Meta(
            description="an agent that changes its history, or asks several times at once, is "
            "refused, or its sample becomes several branches that are trained on with weights that "
            "sum to one"
        ),
    ] = "refuse"
    max_branches: Annotated[
        int,
        Meta(description="branches of a sample, after which changes are refused", ge=2, le=64),
    ] = 16
    python: Annotated[
        str,
        Meta(
            description="Python (3.10 or newer) of those processes, of an environment of its own "
            "in which Umbra need not be installed; empty = this one"
        ),
    ] = ""
    concurrency: Annotated[
        int, Meta(description="conversations at once, per generator; 0 = any", ge=0)
    ] = 0
    options: Annotated[
        dict[str, Any],
        Meta(description="arguments of the environment's constructor, agent or loader"),
    ] = {}

    @property
    def where(self) -> str:
        """What its keys begin with in a sentence about them."""
        return "environment"

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Keys of [sampling] that are others for its samples."""
        return {}

    def sampling_key(self, name: str) -> str:
        """Where that key of its sampling is set."""
        return f"{self.where}.sampling.{name}" if name in self.own_sampling else f"sampling.{name}"

    @property
    def asks(self) -> bool:
        """Whether programs lead its conversations, which ask the model for turns as agents do."""
        return self.kind == "agent" or self.kind in LIBRARIES

    @property
    def starts_agents(self) -> bool:
        """Whether we start these programs; else they come from outside."""
        return self.asks and bool(self.kind != "agent" or self.agent)


class NamedEnvironment(EnvironmentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several environments in a run: the keys of [environment], and these of its own.

    Its prompt rows have its name as "environment".
    """

    name: Annotated[
        str,
        Meta(description="its name in rows and metrics", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"),
    ] = ""
    weight: Annotated[
        float, Meta(description="share of the groups, relative to the others'", gt=0)
    ] = 1.0
    prompts: Annotated[
        str,
        Meta(
            description="source of its prompts, as data.prompts; empty = the rows of data.prompts "
            "with its name"
        ),
    ] = ""
    sampling: Annotated[
        dict[str, Any],
        Meta(
            description="keys of [sampling] that are others for its samples, such as "
            "{ temperature = 0.7, max_tokens = 512 }; all but stop_tokens"
        ),
    ] = {}

    @property
    def where(self) -> str:
        return f"environments.{self.name}"

    @property
    def own_sampling(self) -> dict[str, Any]:
        return self.sampling


class SamplingConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the generators draw tokens."""

    temperature: Annotated[float, Meta(description="softmax temperature", gt=0)] = 1.0
    top_p: Annotated[float, Meta(description="nucleus mass; 1 = off", gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(description="most likely tokens kept; 0 = all", ge=0)] = 0
    min_p: Annotated[float, Meta(description="floor relative to the top token", ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(description="tokens generated per turn at most", ge=1)] = 256
    stop_tokens: Annotated[
        list[str],
        Meta(description="tokens, as text, that end a turn besides those the model names"),
    ] = []
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(description="texts that end a turn, of any number of tokens"),
    ] = []

    @property
    def cuts_off(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class GeneratorConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inference side."""

    count: Annotated[int, Meta(description="generator processes that `umbra up` starts", ge=1)] = 1
    replicas: Annotated[
        int,
        Meta(
            description="engines of one generator process, each a process below it; they share "
            "the visible GPUs",
            ge=1,
        ),
    ] = 1
    engine: Annotated[
        Literal["auto", "torch", "vllm", "replay"],
        Meta(description="inference engine; auto = vllm on a GPU if it is installed, else torch"),
    ] = "auto"
    replay: Annotated[
        str, Meta(description='file of `umbra replay-model`, for engine "replay"')
    ] = ""
    device: Annotated[str, Meta(description="cpu, cuda, cuda:1, ... or auto")] = "auto"
    slots: Annotated[int, Meta(description="sequences decoded at once", ge=1)] = 128
    max_context: Annotated[int, Meta(description="prompt + response tokens per slot", ge=8)] = 1024
    kv_cache_mb: Annotated[
        int,
        Meta(
            description="MiB of keys and values of sequences under way, and of sessions between "
            "two turns, on each GPU; no more samples are leased than fit; 0 = torch: max_context "
            "for every slot, on a CPU as much for sessions; vLLM: what its engine arguments say",
            ge=0,
        ),
    ] = 0
    prefetch: Annotated[
        int, Meta(description="samples leased ahead of free slots, so that none stays empty", ge=0)
    ] = 32
    sessions: Annotated[
        int,
        Meta(
            description="samples under way at once, those that wait for tools included, which take "
            "no slot; 0 = 4 x slots + prefetch",
            ge=0,
        ),
    ] = 0
    partial_flush_tokens: Annotated[
        int,
        Meta(
            description="tokens after which what there is of a sample is sent to the buffer, which "
            "so much is lost of at most; 0 = never",
            ge=0,
        ),
    ] = 512
    stall_s: Annotated[
        float,
        Meta(
            description="seconds that the engine may be busy without a token, or load one version "
            "(besides those for its bytes, weight_hub.least_rate), until this generator ends with "
            "exit code 6",
            gt=0,
        ),
    ] = 600.0
    threads: Annotated[
        int, Meta(description="CPU threads of the engine; 0 = torch's choice", ge=0)
    ] = 0
    kv_policy: Annotated[
        Literal["keep", "recompute", "abort", "drain"],
        Meta(
            description="sequences under way when new weights come: keep their cache, have it "
            "recomputed, are aborted and go on as partials, or (drain) end before, on the old ones"
        ),
    ] = "keep"
    tensor_parallel: Annotated[
        int, Meta(description="GPUs (on CPUs: processes) of one engine; vLLM only", ge=1)
    ] = 1
    engine_args: Annotated[
        dict[str, Any], Meta(description="vLLM's own engine arguments, by their names")
    ] = {}
    serve: Annotated[
        str,
        Meta(
            description="address HOST:PORT where agents ask for completions, for environment.kind "
            '"agent"; a taken port is passed over; empty = a free port for our own agents'
        ),
    ] = ""
    serve_key: Annotated[
        str,
        Meta(
            description="file of the key that agents have to give; empty = variable UMBRA_AGENT_KEY"
        ),
    ] = ""
    serve_advertise: Annotated[
        str,
        Meta(
            description="HOST or HOST:PORT that agents are told instead, if they reach this "
            "generator by another name (containers, a proxy); without a port: the one it has"
        ),
    ] = ""
    receive: Annotated[
        Literal["staged", "streamed"],
        Meta(description="hold new weights beside the old ones, or load them from the hub's host"),
    ] = "staged"

    def engine_on(self, kind: str, *, vllm: bool) -> Literal["torch", "vllm", "replay"]:
        """On a device of that `kind` ("cpu" or "cuda"), where `vllm` is installed or not."""
        if self.engine == "auto":
            return "vllm" if kind == "cuda" and vllm else "torch"
        return self.engine


class ScorerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage worker: rewards, reference or proximal logprobs."""

    stage: Annotated[
        Literal["reward", "ref_logp", "logp"], Meta(description="what this process computes")
    ] = "reward"
    reward: Annotated[int, Meta(description="reward scorers that `umbra up` starts", ge=0)] = 1
    ref_logp: Annotated[int, Meta(description="the same for ref_logp", ge=0)] = 1
    logp: Annotated[int, Meta(description="the same for logp", ge=0)] = 1
    model: Annotated[
        str,
        Meta(
            description="reference model, a directory or ORG/NAME[@REVISION] on the hub; empty = "
            "model.path"
        ),
    ] = ""
    capacity: Annotated[int, Meta(description="trajectories leased at once", ge=1)] = 32
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
        Meta(description="backend of attention over packed rows, as of the trainer"),
    ] = "auto"
    logits_mib: Annotated[float, Meta(description="MiB of float32 logits at a time", gt=0)] = 256.0
    device: Annotated[str, Meta(description="cpu, cuda, cuda:1, ... or auto")] = "auto"
    threads: Annotated[int, Meta(description="CPU threads; 0 = torch's choice", ge=0)] = 0


class EnvWorkerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs the agents of a run on a machine of their own."""

    count: Annotated[
        int,
        Meta(
            description='env-workers that `umbra up` starts, if environment.run_on = "env_worker"',
            ge=0,
        ),
    ] = 1
    sessions: Annotated[
        int,
        Meta(
            description="sessions of an env-worker at once; 0 = as many as its processes "
            "(environment.workers) take",
            ge=0,
        ),
    ] = 0
