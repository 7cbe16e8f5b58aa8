"""The processes of a plan as any launcher starts them; the writers only put this into syntax."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from umbra.deploy.cluster.cluster_file import Port, Task
from umbra.deploy.cluster.plan import STAGES, Plan, Process
from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.net.keys import PUBLIC, SECRET
from umbra.services.config import RunConfig
from umbra.services.modeling.hub import looks_like_name
from umbra.services.process.child import with_fast_copies
from umbra.services.process.parent import SEARCH_VARIABLE
from umbra.services.prompts import DATASETS, is_function, is_parquet


class TaskKind(NamedTuple):
    """A task's command, which is its section of the run file; its keys; its ports."""

    section: str
    role: KeyRole
    ports: tuple[Port, ...] = ()


KINDS: dict[Task, TaskKind] = {
    "buffer": TaskKind("buffer", "buffer", (Port.CONTROL, Port.DATA, Port.EVENTS)),
    "weight_hub": TaskKind("weight_hub", "weight_hub", (Port.WEIGHTS, Port.BUCKETS)),
    "relay": TaskKind("weight_hub", "relay", (Port.WEIGHTS, Port.BUCKETS)),
    "part": TaskKind("weight_hub", "part", (Port.PART,)),
    "train": TaskKind("trainer", "trainer"),
    "generate": TaskKind("generator", "generator"),
    **dict.fromkeys(STAGES, TaskKind("scorer", "scorer")),
}
# How often a process is started again. A trainer repeats its steps since the last checkpoint; over
# several nodes it also has to wait for one that is away.
TRAINER_RESTARTS, RESTARTS = 3, 20
ROOT = "/srv/umbra"  # of a run's files in containers
CONFIG_FILE = "run.toml"


class Paths(NamedTuple):
    """Folders of a process's files; `keys` and `modules` may be empty: none."""

    config: str
    results: str
    store: str
    keys: str
    modules: str
    cache: str = ""  # for what it downloads; empty: the user's own


def container_paths(plan: Plan, modules: str, *, keys: bool) -> Paths:
    results, store = (f"{ROOT}/{name}/{plan.run_id}" for name in ("results", "store"))
    folder = f"{ROOT}/keys" if keys else ""
    return Paths(f"{ROOT}/{CONFIG_FILE}", results, store, folder, modules, f"{ROOT}/cache")


class Launch:
    """Command and mounts of a process, as any launcher starts it."""

    def __init__(self, plan: Plan, process: Process, paths: Paths) -> None:
        cluster, task, kind = plan.cluster, process.task, KINDS[process.task]
        several_nodes = task == "train" and len(plan.trainers()) > 1
        sources = _sources(plan.config, task)
        self.process, self.role = process, kind.role
        self.command = _command(plan, process, paths)  # arguments of `umbra`
        self.health = _health(plan, process)  # the same, to check the process from beside it
        self.image = _image(plan, process, sources)
        self.restarts = TRAINER_RESTARTS if task == "train" and not several_nodes else RESTARTS
        self.ports = ports(plan, process)
        # The ranks of several nodes connect with each other at ports that gloo and NCCL choose.
        self.host_network = cluster.network == "host" or several_nodes
        inputs = {path for path in sources if path and not _is_elsewhere(path)}
        if paths.modules and task in ("buffer", "generate", "reward"):
            inputs.add(paths.modules)
        self.inputs = sorted(inputs)  # read at the same path on every node
        # Mounted at their values; shm is shared by the node's processes, for versions of weights.
        self.volumes = {"results": str(Path(paths.results).parent)}
        if task == "buffer":
            self.volumes["store"] = str(Path(paths.store).parent)
        else:
            self.volumes["shm"] = "/dev/shm"
        if any(map(_is_elsewhere, sources)):
            self.volumes["cache"] = paths.cache

    @property
    def key_files(self) -> list[str]:
        """Return the key files that it needs: all public ones; its own and the monitor's secret."""
        secret = sorted({self.role, "monitor"})
        return [*(f"{r}{PUBLIC}" for r in KEY_ROLES), *(f"{r}{SECRET}" for r in secret)]


def launches(plan: Plan, paths: Paths) -> list[Launch]:
    return [Launch(plan, process, paths) for process in plan.processes]


def ports(plan: Plan, process: Process) -> list[int]:
    """Return the ports that `process` binds and others reach; gloo and NCCL choose theirs."""
    is_rendezvous = process.task == "train" and len(plan.trainers()) > 1 and not process.node_rank
    kinds = (Port.RENDEZVOUS,) if is_rendezvous else KINDS[process.task].ports
    return [plan.cluster.port(kind) for kind in kinds]


def environment(plan: Plan, paths: Paths) -> dict[str, str]:
    """Return the environment of all processes, which has the buffer's address."""
    broker = f"tcp://{plan.the('buffer').node.address}:{plan.cluster.port(Port.CONTROL)}"
    variables = {"UMBRA_BROKER": broker, **with_fast_copies({})}
    if paths.keys:
        variables["UMBRA_SECURITY__KEYS"] = paths.keys
    if paths.modules:
        variables[SEARCH_VARIABLE] = paths.modules
    tasks: set[Task] = {process.task for process in plan.processes}
    if paths.cache and any(_is_elsewhere(n) for task in tasks for n in _sources(plan.config, task)):
        variables |= {"HF_HOME": f"{paths.cache}/huggingface", "XDG_CACHE_HOME": paths.cache}
    return variables


def _command(plan: Plan, process: Process, paths: Paths) -> list[str]:
    port, trainer, task = plan.cluster.port, plan.config.trainer, process.task
    section, served = KINDS[task].section, KINDS[task].ports
    keys, flags = dict[str, object](), list[str]()
    match section:
        case "buffer":
            flags = ["--broker", f"tcp://0.0.0.0:{port(Port.CONTROL)}"]
            keys = {"ports": [port(kind) for kind in served[1:]], "store": paths.store}
        case "weight_hub":
            keys = {"listen": f"tcp://0.0.0.0:{port(served[0])}"}
            if task != "weight_hub":
                address = plan.the("weight_hub").node.address
                flags = ["--upstream", f"tcp://{address}:{port(Port.WEIGHTS)}"]
            if task == "part":
                flags += ["--owner", str(process.node_rank)]
        case "trainer":
            keys["ranks"] = trainer.ranks
            if trainer.nodes > 1:
                rendezvous = f"{plan.the('train').node.address}:{port(Port.RENDEZVOUS)}"
                keys |= {"nodes": trainer.nodes, "rendezvous": rendezvous}
                flags = ["--node-rank", str(process.node_rank)]
        case "scorer":
            flags = ["--stage", task]
        case _:
            pass
    if served:
        flags += ["--advertise", process.node.address]
    else:
        keys["device"] = "cuda" if process.gpus else "cpu"
    command = [section.replace("_", "-"), *flags]
    for key, value in keys.items():
        command += ["--set", f"{section}.{key}={value}"]
    return [*command, "--name", process.name, "--config", paths.config, "--run-dir", paths.results]


def _health(plan: Plan, process: Process) -> list[str]:
    if process.task == "buffer":
        return ["status", "--ping", "--broker", f"tcp://127.0.0.1:{ports(plan, process)[0]}"]
    # Of a trainer only rank 0 is a member of the run; all ranks live and die with it.
    name = plan.the("train").name if process.task == "train" else process.name
    return ["status", "--member", name]


def _image(plan: Plan, process: Process, sources: list[str]) -> str:
    data_sets = any(name.startswith(DATASETS) or is_parquet(name) for name in sources)
    serves = KINDS[process.task].ports and not process.gpus  # without torch
    target = "generator" if process.task == "generate" else "trainer"
    if serves and not (process.task == "buffer" and data_sets):
        target = "broker"
    elif not any(node.gpus for node in plan.nodes):
        target = "cpu"
    return f"{plan.cluster.image}-{target}:{plan.cluster.tag}"


def _is_elsewhere(name: str) -> bool:
    return name.startswith(DATASETS) or looks_like_name(name)


def _sources(config: RunConfig, task: Task) -> list[str]:
    """Return the models, prompts and other files of the run file that `task` reads."""
    match task:
        case "relay" | "part":
            return []
        case "buffer":
            return [name for name in _prompts_of(config) if not is_function(name)]
        case "train":
            return [config.model.path, config.critic.path]
        case "generate" | "reward":
            return [config.model.path, config.model.chat_template]
        case "ref_logp":
            return [config.model.path, *config.scorer.models.values()]
        case _:
            return [config.model.path]


def modules_of(config: RunConfig, run_file: Path) -> str:
    """Return the folder of the user's own modules; empty if the run names none."""
    names = _prompts_of(config)
    for one in config.all_environments:
        names += [one.kind, *one.rewards, one.agent, one.id, one.sandbox]
        names += tools if isinstance(tools := one.options.get("tools"), list) else ()
    return str(run_file.resolve().parent) if any(is_function(str(n)) for n in names) else ""


def _prompts_of(config: RunConfig) -> list[str]:
    environments = [environment.prompts for environment in config.environments]
    return [config.data.prompts, *environments, config.eval.prompts]
