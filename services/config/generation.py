"""Sections of rollouts: environment, sampling, generators and scorers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from umbra.proto.bounds import TOKENS
from umbra.proto.net.keys import is_loopback
from umbra.proto.records import Sampling
from umbra.services.config.keys import Section, key

ENVIRONMENT = "environment"
"""The field of a prompt row that names its environment, in a run with several."""


def environment_prefix(name: str) -> str:
    return f"{name}/"


def environment_of(prompt_id: str) -> str:
    """Return the environment's name in a prompt's id, if there are several environments."""
    return prompt_id.partition("/")[0]


LIBRARIES = ("verifiers", "openenv", "trl")
"""Kinds of environments that other libraries define; programs of ours play them."""
JUDGED_AT_ONCE = ("exact", "numeric", "math", "reward")
"""Kinds whose one step is the reward."""
_REWARDED = ("reward", "trl")  # kinds that take functions of the user's


class EnvironmentConfig(Section):
    """The environment of rollouts, and their reward."""

    kind: str = key(
        "exact",
        '"exact", "numeric", "math", "guess", "tools", "reward", "agent", '
        '"verifiers", "openenv", "trl" or a class as "module:Class"',
    )
    reward: str | dict[str, float] = key(
        "",
        'for kinds "reward" and "trl": reward function as "module:function", or several, each with '
        "its weight, whose values are parts of the reward",
    )
    reward_scope: Literal["sample", "group"] = key(
        "sample",
        "what a function with the parameter completions is called with: one sample, or (group; "
        "kind reward, scorers do it) all samples of a prompt's group at once",
    )
    id: str = key(
        "",
        'for kind "verifiers": name of the environment or taskset; "openenv": URL of a server; '
        '"trl": class as "module:Class"',
    )
    agent: str = key(
        "", 'agent as "module:function", for kind "agent"; empty = agents come to generator.serve'
    )
    timeout_s: float = key(
        30.0,
        "seconds that one step of the environment may take, or that a program that asks for "
        "turns may be silent for between two of them",
        gt=0,
    )
    setup_s: float = key(120.0, "seconds in which a process for user code must have started", gt=0)
    max_turns: int = key(0, "turns of the model; 0 = any number", ge=0)
    max_tokens: int = key(0, "response tokens, the environment's included; 0 = any", ge=0)
    workers: int = key(
        4,
        "processes that run user code, per generator or scorer; 0 = none, since `umbra "
        "run-agents` runs the environment elsewhere",
        ge=0,
    )
    memory_mb: int = key(
        4096, "MiB of address space that such a process may take for its plays; 0 = any", ge=0
    )
    sandbox: str = key(
        "",
        'where a model\'s code runs: "docker" or a class as "module:Class"; empty = '
        "there are no tools that run code",
    )
    sandbox_options: dict[str, Any] = key(
        {}, "image and limits of its containers, or the class's arguments"
    )
    branches: Literal["refuse", "train"] = key(
        "refuse",
        "an agent that changes its history, or asks several times at once, is refused, or its "
        "sample becomes several branches that are trained on with weights that sum to one",
    )
    max_branches: ClassVar[int] = 16  # of a sample; changes of the history are refused after
    options: dict[str, Any] = key({}, "arguments of the environment's constructor, agent or loader")

    @property
    def where(self) -> str:
        """Return the prefix of its keys in messages."""
        return "environment"

    @property
    def own_sampling(self) -> dict[str, Any]:
        return {}

    def sampling_key(self, name: str) -> str:
        return f"{self.where}.sampling.{name}" if name in self.own_sampling else f"sampling.{name}"

    @property
    def rewards(self) -> tuple[str, ...]:
        return tuple(self.reward) if isinstance(self.reward, dict) else (self.reward,)

    @property
    def asks(self) -> bool:
        """True if programs lead its conversations, and ask the model for turns as agents do."""
        return self.kind == "agent" or self.kind in LIBRARIES

    @property
    def starts_agents(self) -> bool:
        """True if generators start these programs; else they connect to generator.serve."""
        return self.asks and self.workers > 0 and bool(self.kind != "agent" or self.agent)

    def environment_faults(self, serve: str, max_context: int) -> Iterator[str]:
        """Yield settings that fail, or have no effect, with these two keys of the generators."""
        where, kind, programs = self.where, self.kind, " or ".join(("agent", *LIBRARIES))
        if kind == "agent" and not self.agent and not serve:
            yield f"{where}.kind = agent has no agent: set {where}.agent, or generator.serve"
        if self.reward_scope == "group" and kind != "reward":
            why = ", whose objects are in several processes" if kind == "trl" else ""
            yield (
                f"{where}.reward_scope = group has no effect with kind {kind}{why}: set "
                f"{where}.kind to reward, whose functions may take a group, or remove it"
            )
        if not self.workers and not self.asks:
            yield f"{where}.workers = 0 needs {where}.kind = {programs}: set it to 1 or more"
        if not self.workers and not serve:
            yield f"{where}.workers = 0 leaves programs to `umbra run-agents`: set generator.serve"
        for name, value, kinds in (
            ("agent", self.agent, ("agent",)),
            ("id", self.id, LIBRARIES),
            ("reward", self.reward, _REWARDED),
        ):
            if value and kind not in kinds:
                yield (
                    f"{where}.{name} = {value} has no effect: set {where}.kind to "
                    f"{' or '.join(kinds)}, or remove it"
                )
        if kind in LIBRARIES and not self.id:
            yield f"{where}.kind = {kind} needs {where}.id"
        if kind == "verifiers" and self.max_turns:
            yield f"{where}.max_turns is not for verifiers: use the one in {where}.options"
        if self.branches == "train" and not self.asks:
            yield f"{where}.branches = train needs {where}.kind = {programs}: remove it"
        most = TOKENS // self.max_branches
        if self.branches == "train" and max_context > most:
            yield (
                f"{self.max_branches} branches of generator.max_context = {max_context} are more "
                f"than the {TOKENS} tokens of a sample: lower max_context to {most}"
            )


class NamedEnvironment(EnvironmentConfig):
    """One of several environments in a run: the keys of [environment], and these of its own.

    Its prompt rows have its name as "environment".
    """

    name: str = key("", "its name in rows and metrics", pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    weight: float = key(1.0, "share of the groups, relative to the others'", gt=0)
    prompts: str = key("", "as data.prompts, which is left out then")
    sampling: dict[str, Any] = key(
        {},
        "keys of [sampling] that are others for its samples, such as { temperature = 0.7, "
        "max_tokens = 512 }; all but stop_tokens",
    )

    @property
    def where(self) -> str:
        return f"environments.{self.name}"

    @property
    def own_sampling(self) -> dict[str, Any]:
        return self.sampling


class SamplingConfig(Section):
    """Sampling of tokens by the generators."""

    temperature: float = key(1.0, "softmax temperature", gt=0)
    top_p: float = key(1.0, "nucleus mass; 1 = off", gt=0, le=1)
    top_k: int = key(0, "most likely tokens kept; 0 = all", ge=0)
    min_p: float = key(0.0, "floor relative to the top token", ge=0, le=1)
    max_tokens: int = key(256, "tokens generated per turn at most", ge=1)
    stop_tokens: list[str] = key([], "tokens, as text, that end a turn besides the model's own")
    stop: list[str] = key([], "texts that end a turn, of any number of tokens", min_length=1)


def sampling_of(config: SamplingConfig, *, greedy: bool = False) -> Sampling:
    return Sampling(
        temperature=0.0 if greedy else config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
    )


class GeneratorConfig(Section):
    """The inference side."""

    count: int = key(
        1,
        "generator processes that `umbra up` starts; with generator.device = cuda:N each gets "
        "the next tensor_parallel GPUs, from N on; 0 = none: one runs where generator.urls are",
        ge=0,
    )
    engine: Literal["auto", "torch", "vllm", "vllm-http"] = key(
        "auto", "inference engine; auto = vllm on a GPU if it is installed, else torch"
    )
    urls: list[str] = key([], "servers of vllm-http, as http://127.0.0.1:PORT or unix:PATH")
    device: str = key("auto", "cpu, cuda, cuda:1, ... or auto")
    slots: int = key(128, "sequences decoded at once", ge=1)
    max_context: int = key(1024, "prompt + response tokens per slot", ge=8)
    sessions: int = key(
        0,
        "samples under way at once, those that wait for tools included, which take no slot; 0 = "
        "4 x slots, and a quarter of them",
        ge=0,
    )
    partial_flush_tokens: int = key(
        512,
        "tokens between saves of a partial rollout in the buffer, the most that a crash loses "
        "of it; 0 = no saves",
        ge=0,
    )
    threads: int = key(0, "CPU threads; 0 = a share of the cores in `umbra up`, else all", ge=0)
    kv_policy: Literal["keep", "recompute", "drain"] = key(
        "keep",
        "sequences in flight at new weights: keep the KV cache, recompute it, or drain (finish "
        "them on the old weights first)",
    )
    tensor_parallel: int = key(1, "GPUs (on CPUs: processes) of one engine; vLLM only", ge=1)
    engine_args: dict[str, Any] = key({}, "vLLM's own engine arguments, by their names")
    serve: str = key(
        "",
        'address HOST:PORT where agents ask for completions, for environment.kind "agent"; a '
        "taken port is passed over; empty = a free port for our own agents",
    )
    serve_advertise: str = key(
        "",
        "HOST or HOST:PORT that agents are told instead of generator.serve (containers, a proxy)",
    )

    @property
    def prefetch(self) -> int:
        """Return how many samples are leased ahead of free slots, so that none stays empty."""
        return max(1, self.slots // 4)

    def engine_on(self, kind: str, *, vllm: bool) -> Literal["torch", "vllm", "vllm-http"]:
        """Return the engine for a device of `kind` "cpu" or "cuda", with or without `vllm`."""
        if self.engine == "auto":
            return "vllm" if kind == "cuda" and vllm else "torch"
        return self.engine

    def engine_faults(self, engine: str) -> Iterator[str]:
        """Yield keys that `engine`, which is not `auto`, does not have."""
        for name in ("engine_args", "tensor_parallel") if engine != "vllm" else ():
            if getattr(self, name) not in ({}, 1):
                yield f"generator.{name} is for vLLM: leave it out, or set generator.engine = vllm"

    def faults(self) -> Iterator[str]:
        sessions, slots = self.sessions, self.slots
        if 0 < sessions < slots:
            yield f"generator.sessions = {sessions} is below generator.slots = {slots}: raise it"
        if (self.engine == "vllm-http") != bool(self.urls):
            given = f"generator.urls = {self.urls} with generator.engine = {self.engine}"
            yield f"{given}: set both urls and vllm-http, or neither"
        if not self.urls and not self.count:
            yield "generator.count = 0 leaves the run without a generator: set it to 1 or more"
        if self.urls and self.count > 1:
            yield f"generator.count = {self.count}, but one has all of generator.urls: set it to 1"
        for url in self.urls:
            try:
                parts = urlsplit(url)
                local = is_loopback(parts.hostname or "") and parts.port is not None
            except ValueError:
                local = False
            if not url.startswith("unix:/") and not (url.startswith("http://") and local):
                yield (
                    f"generator.urls: {url} is not of this host, and no key of vLLM keeps others "
                    "from replacing weights: use http://127.0.0.1:PORT or unix:/PATH, and a "
                    "generator on each host with servers"
                )


class ScorerConfig(Section):
    """A stage worker: rewards, reference or proximal logprobs."""

    count: dict[Literal["reward", "ref_logp", "logp"], int] = key(
        {}, "processes of a stage that `umbra up` starts, such as { reward = 4 }; else one", ge=0
    )
    model: str | dict[str, str] = key(
        "",
        "reference model or teacher, a directory or ORG/NAME[@REVISION] on the hub; empty = "
        "model.path. Or one for each of [[environments]], by name",
    )
    capacity: ClassVar[int] = 32  # trajectories leased at once
    device: str = key("auto", "cpu, cuda, cuda:1, ... or auto")

    @property
    def models(self) -> dict[str, str]:
        """Return the reference models by environment; "" stands for any of them."""
        if isinstance(self.model, dict):
            return self.model
        return {"": self.model} if self.model else {}

    def processes(self, stage: str) -> int:
        return {**self.count}.get(stage, 1)
