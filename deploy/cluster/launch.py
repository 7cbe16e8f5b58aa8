"""The processes of a plan as any launcher starts them; the writers only put this into syntax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from umbra.deploy.cluster.cluster_file import Port, Task
from umbra.deploy.cluster.plan import Plan, Process
from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.net.keys import PUBLIC, SECRET
from umbra.services.config import RunConfig
from umbra.services.modeling.hub import looks_like_name
from umbra.services.process.child import with_fast_copies
from umbra.services.process.parent import SEARCH_VARIABLE
from umbra.services.prompts import DATASETS, is_function, is_parquet

# The ports of what serves others, which needs no torch unless it broadcasts from GPUs.
PORTS: dict[Task, tuple[Port, ...]] = {
    "buffer": (Port.CONTROL, Port.DATA, Port.EVENTS),
    "weight_hub": (Port.WEIGHTS, Port.BUCKETS),
    "relay": (Port.WEIGHTS, Port.BUCKETS),
    "part": (Port.PART,),
}
KEYS: dict[Task, KeyRole] = {
    "buffer": "buffer",
    "weight_hub": "weight_hub",
    "relay": "relay",
    "part": "part",
    "train": "trainer",
    "generate": "generator",
    "ref_logp": "scorer",
    "logp": "scorer",
    "reward": "scorer",
}
# How often the launcher starts a process again. A trainer repeats its steps since the last
# checkpoint; over several nodes it also has to wait for one that is away.
TRAINER_RESTARTS = 3
RESTARTS = 20
ROOT = "/srv/umbra"  # of a run's files in containers
CONFIG_FILE = "run.toml"


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders of a process's files; `keys` and `modules` may be empty: none.

    `cache` is for what it downloads; empty: the user's own.
    """

    config: str
    results: str
    store: str
    keys: str
    modules: str
    cache: str = ""


def container_paths(plan: Plan, modules: str, *, keys: bool) -> Paths:
    return Paths(
        config=f"{ROOT}/{CONFIG_FILE}",
        results=f"{ROOT}/results/{plan.run_id}",
        store=f"{ROOT}/store/{plan.run_id}",
        keys=f"{ROOT}/keys" if keys else "",
        modules=modules,
        cache=f"{ROOT}/cache",
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and mounts of a process.

    `command` and `health` are arguments of `umbra`, the second checks the process from beside it.
    `volumes` are mounted at their values: results, store, shm (shared by the node's processes, for
    the versions of the weights) and cache. `inputs` are read at the same path on every node.
    """

    process: Process
    command: list[str]
    health: list[str]
    image: str
    restarts: int
    ports: list[int]  # that it binds and others reach; gloo and NCCL choose theirs
    host_network: bool
    inputs: list[str]
    volumes: dict[str, str]
    role: KeyRole
    memory_mib: int | None  # at most, shared memory included for the process that makes it
    cpus: float | None

    @property
    def fetches(self) -> bool:
        return "cache" in self.volumes

    @property
    def key_files(self) -> list[str]:
        """Return the key files that it needs: all public ones; its own and the monitor's secret."""
        secret = sorted({self.role, "monitor"})
        return [*(f"{r}{PUBLIC}" for r in KEY_ROLES), *(f"{r}{SECRET}" for r in secret)]


def launches(plan: Plan, paths: Paths) -> list[Launch]:
    return [launch(plan, process, paths) for process in plan.processes]


def launch(plan: Plan, process: Process, paths: Paths) -> Launch:
    cluster, task = plan.cluster, process.task
    several_nodes = task == "train" and len(plan.trainers()) > 1
    sources = _sources(plan.config, task)
    inputs = {path for path in sources if path and not _is_elsewhere(path)}
    if paths.modules and task in ("buffer", "generate", "reward"):
        inputs.add(paths.modules)
    volumes = {"results": str(Path(paths.results).parent)}
    if task == "buffer":
        volumes["store"] = str(Path(paths.store).parent)
    else:
        volumes["shm"] = "/dev/shm"
    if any(map(_is_elsewhere, sources)):
        volumes["cache"] = paths.cache
    memory = cluster.memory_gib.get(task)
    if memory is not None and task in ("weight_hub", "relay", "part"):
        memory += cluster.shm_gib
    return Launch(
        process,
        command=_command(plan, process, paths),
        health=_health(plan, process),
        image=_image(plan, process, sources),
        restarts=TRAINER_RESTARTS if task == "train" and not several_nodes else RESTARTS,
        ports=ports(plan, process),
        # The ranks of several nodes connect with each other at ports that gloo and NCCL choose.
        host_network=cluster.network == "host" or several_nodes,
        inputs=sorted(inputs),
        volumes=volumes,
        role=KEYS[task],
        memory_mib=None if memory is None else round(memory * 1024),
        cpus=cluster.cpus.get(task),
    )


def ports(plan: Plan, process: Process) -> list[int]:
    """Return the ports that `process` binds and others reach."""
    is_rendezvous = process.task == "train" and len(plan.trainers()) > 1 and not process.node_rank
    kinds = (Port.RENDEZVOUS,) if is_rendezvous else PORTS.get(process.task, ())
    return [plan.cluster.port(kind) for kind in kinds]


def environment(plan: Plan, paths: Paths) -> dict[str, str]:
    """Return the environment of all processes, which has the buffer's address."""
    broker = plan.the("buffer").node.address
    variables = {"UMBRA_BROKER": f"tcp://{broker}:{plan.cluster.port(Port.CONTROL)}"}
    variables |= with_fast_copies({})
    if paths.keys:
        variables["UMBRA_SECURITY__KEYS"] = paths.keys
    if paths.modules:
        variables[SEARCH_VARIABLE] = paths.modules
    tasks: set[Task] = {process.task for process in plan.processes}
    if paths.cache and any(_is_elsewhere(n) for task in tasks for n in _sources(plan.config, task)):
        variables |= {"HF_HOME": f"{paths.cache}/huggingface", "XDG_CACHE_HOME": paths.cache}
    return variables


def _command(plan: Plan, process: Process, paths: Paths) -> list[str]:
    port, trainer = plan.cluster.port, plan.config.trainer
    section, keys, flags = process.task, dict[str, object](), list[str]()
    match process.task:
        case "buffer":
            flags = ["--broker", f"tcp://0.0.0.0:{port(Port.CONTROL)}"]
            keys = {"ports": [port(kind) for kind in PORTS["buffer"][1:]], "store": paths.store}
        case "weight_hub" | "relay" | "part":
            section = "weight_hub"
            keys = {"listen": f"tcp://0.0.0.0:{port(PORTS[process.task][0])}"}
            if process.task != "weight_hub":
                address = plan.the("weight_hub").node.address
                flags = ["--upstream", f"tcp://{address}:{port(Port.WEIGHTS)}"]
            if process.task == "part":
                flags += ["--owner", str(process.node_rank)]
        case "train":
            section = "trainer"
            keys["ranks"] = trainer.ranks
            if trainer.nodes > 1:
                rendezvous = f"{plan.the('train').node.address}:{port(Port.RENDEZVOUS)}"
                keys |= {"nodes": trainer.nodes, "rendezvous": rendezvous}
                flags = ["--node-rank", str(process.node_rank)]
        case "generate":
            section = "generator"
        case "ref_logp" | "logp" | "reward":
            section, flags = "scorer", ["--stage", process.task]
    if section in ("buffer", "weight_hub"):
        flags += ["--advertise", process.node.address]
    else:
        keys["device"] = "cuda" if process.gpus else "cpu"
    command = [section.replace("_", "-"), *flags]
    for key, value in keys.items():
        command += ["--set", f"{section}.{key}={value}"]
    return [*command, "--name", process.name, "--config", paths.config, "--run-dir", paths.results]


def _health(plan: Plan, process: Process) -> list[str]:
    local = [f"tcp://127.0.0.1:{port}" for port in ports(plan, process)[:1]]
    match process.task:
        case "buffer":
            return ["status", "--ping", "--broker", *local]
        case "weight_hub":
            return ["status", "--hub", *local]
        case "relay":
            return ["status", "--relay", *local]
        case "train":  # only rank 0 is a member of the run; all ranks live and die with it
            return ["status", "--member", plan.the("train").name]
        case _:
            return ["status", "--member", process.name]


def _image(plan: Plan, process: Process, sources: list[str]) -> str:
    data_sets = any(name.startswith(DATASETS) or is_parquet(name) for name in sources)
    reads_them = process.task == "buffer" and data_sets
    if process.task in PORTS and not process.gpus and not reads_them:
        target = "broker"
    elif not plan.on_gpus:
        target = "cpu"
    else:
        target = "generator" if process.task == "generate" else "trainer"
    return f"{plan.cluster.image}-{target}:{plan.cluster.tag}"


def _is_elsewhere(name: str) -> bool:
    return name.startswith(DATASETS) or looks_like_name(name)


def _sources(config: RunConfig, task: Task) -> list[str]:
    """Return the models, prompts and other files of the run file that `task` reads."""
    chat = [config.model.path, config.model.chat_template]
    sources: dict[Task, list[str]] = {
        "buffer": [name for name in _prompts_of(config) if not is_function(name)],
        "relay": [],
        "part": [],
        "train": [config.model.path, config.critic.path],
        "generate": chat,
        "reward": chat,
        "ref_logp": [config.model.path, *config.scorer.models.values()],
    }
    return sources.get(task, [config.model.path])


def modules_of(config: RunConfig, run_file: Path) -> str:
    """Return the folder of the user's own modules; empty if the run names none."""
    names = [name for name in _prompts_of(config) if is_function(name)]
    for environment in config.all_environments:
        names += [environment.kind, *environment.rewards, environment.agent, environment.id]
    return str(run_file.resolve().parent) if any(":" in name for name in names) else ""


def _prompts_of(config: RunConfig) -> list[str]:
    environments = [environment.prompts for environment in config.environments]
    return [*config.data.sources, *environments, config.eval.prompts]
