"""How a planned process is started: command, environment, ports, what it reads and writes."""

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
from umbra.services.prompts.download import is_url
from umbra.services.prompts.readers import DATASETS, is_function, is_parquet

# The ports of what serves others, which needs no torch unless it broadcasts from GPUs.
PORTS: dict[Task, tuple[Port, ...]] = {
    "buffer": (Port.CONTROL, Port.DATA, Port.EVENTS_IN, Port.EVENTS_OUT),
    "weight_hub": (Port.WEIGHTS, Port.BUCKETS, Port.CONNECTIONS),
    "relay": (Port.WEIGHTS, Port.BUCKETS, Port.CONNECTIONS),
    "part": (Port.PART, Port.PART_CONNECTIONS),
}
# Whose key a process has; besides, all have the monitor's, for their health checks.
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


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a process finds and leaves its files; `keys` and `modules` may be empty: none.

    `cache` is for what it downloads; empty: the user's own.
    """

    config: str
    results: str
    store: str
    keys: str
    modules: str
    cache: str = ""


def command(plan: Plan, process: Process, paths: Paths) -> list[str]:
    """Return the arguments of `umbra` for `process`; the buffer's address is in the environment."""
    common = ["--name", process.name, "--config", paths.config, "--run-dir", paths.results]
    advertise = process.node.address
    port = plan.cluster.port
    everywhere = {which: f"tcp://0.0.0.0:{port(which)}" for which in Port}
    device = "cuda" if process.gpus else "cpu"
    match process.task:
        case "buffer":
            others = [port(which) for which in PORTS["buffer"][1:]]
            own = ["buffer", "--broker", everywhere[Port.CONTROL], "--ports", str(others)]
            own += ["--advertise", advertise, "--store", paths.store]
        case "weight_hub":
            own = ["weight-hub", "--listen", everywhere[Port.WEIGHTS], "--advertise", advertise]
        case "relay":
            own = ["weight-hub", "--upstream", _hub(plan), "--listen", everywhere[Port.WEIGHTS]]
            own += ["--advertise", advertise]
        case "part":
            own = ["weight-hub", "--upstream", _hub(plan), "--owner", str(process.node_rank)]
            own += ["--listen", everywhere[Port.PART], "--advertise", advertise]
        case "train":
            own = ["trainer", "--device", device, "--ranks", str(plan.config.trainer.ranks)]
            if plan.config.trainer.nodes > 1:
                meet = f"{plan.the('train').node.address}:{port(Port.RENDEZVOUS)}"
                own += ["--nodes", str(plan.config.trainer.nodes), "--rendezvous", meet]
                own += ["--node-rank", str(process.node_rank)]
        case "generate":
            own = ["generator", "--device", device]
        case "ref_logp" | "logp" | "reward":
            own = ["scorer", "--stage", process.task, "--device", device]
    return [*own, *common]


def environment(plan: Plan, paths: Paths) -> dict[str, str]:
    broker = plan.the("buffer").node.address
    variables = {"UMBRA_BROKER": f"tcp://{broker}:{plan.cluster.port(Port.CONTROL)}"}
    variables |= with_fast_copies({})
    if paths.keys:
        variables["UMBRA_SECURITY__KEYS"] = paths.keys
    if paths.modules:
        variables[SEARCH_VARIABLE] = paths.modules
    if paths.cache and any(fetches(plan, process) for process in plan.processes):
        variables |= {"HF_HOME": f"{paths.cache}/huggingface", "XDG_CACHE_HOME": paths.cache}
    return variables


def health(plan: Plan, process: Process) -> list[str]:
    """The arguments of `umbra` that check `process` from beside it.

    Of a trainer's ranks only rank 0 is a member of the run; all live and die with it.
    """
    here = [f"tcp://127.0.0.1:{port}" for port in ports(plan, process)[:1]]
    match process.task:
        case "buffer":
            return ["status", "--ping", "--broker", *here]
        case "weight_hub":
            return ["status", "--hub", *here]
        case "relay":
            return ["status", "--relay", *here]
        case "train":
            return ["status", "--member", plan.the("train").name]
        case _:
            return ["status", "--member", process.name]


def key_files(process: Process) -> list[str]:
    """Return the key files that `process` needs: all public ones, and few secret ones."""
    secret = {KEYS[process.task], "monitor"}
    public = [f"{role}{PUBLIC}" for role in KEY_ROLES]
    return [*public, *(f"{role}{SECRET}" for role in sorted(secret))]


def ports(plan: Plan, process: Process) -> list[int]:
    """Return the ports that `process` binds and others reach; gloo and NCCL choose theirs."""
    meets = process.task == "train" and len(plan.trainers()) > 1 and not process.node_rank
    found = (Port.RENDEZVOUS,) if meets else PORTS.get(process.task, ())
    return [plan.cluster.port(which) for which in found]


def on_host_network(plan: Plan, process: Process) -> bool:
    """Whether `process` needs the network of its host: no list of ports would do.

    The ranks of several nodes connect with each other at ports that gloo and NCCL choose.
    """
    return plan.cluster.network == "host" or (process.task == "train" and len(plan.trainers()) > 1)


def image(plan: Plan, process: Process) -> str:
    reads_data_sets = process.task == "buffer" and any(
        name.startswith(DATASETS) or is_parquet(name) for name in _read_by(plan, process)
    )
    if process.task in PORTS and not process.gpus and not reads_data_sets:
        target = "broker"
    elif not plan.on_gpus:
        target = "cpu"
    else:
        target = "generator" if process.task == "generate" else "trainer"
    return f"{plan.cluster.image}-{target}:{plan.cluster.tag}"


def restarts(plan: Plan, process: Process) -> int:
    if process.task == "train" and len(plan.trainers()) == 1:
        return TRAINER_RESTARTS
    return RESTARTS


def memory_gib(plan: Plan, process: Process) -> float | None:
    """The most memory that `process` may use, in GiB; None is no limit.

    Shared memory counts for the process that makes it: the hub, the relay or the part.
    """
    limit = plan.cluster.memory_gib.get(process.task)
    if limit is None:
        return None
    makes_memory = process.task in ("weight_hub", "relay", "part")
    return limit + (plan.cluster.shm_gib if makes_memory else 0)


def inputs(plan: Plan, process: Process, paths: Paths) -> list[str]:
    """Return the files that `process` reads, at the same place on every node."""
    found = [path for path in _read_by(plan, process) if not _is_elsewhere(path)]
    if process.task in ("buffer", "generate", "reward"):
        found.append(paths.modules)
    return sorted({path for path in found if path})


def fetches(plan: Plan, process: Process) -> bool:
    """True if `process` reads models or prompts that it has to download."""
    return any(map(_is_elsewhere, _read_by(plan, process)))


def _is_elsewhere(name: str) -> bool:
    """True if `name` is no path on the nodes."""
    return name.startswith(DATASETS) or is_url(name) or looks_like_name(name)


def _read_by(plan: Plan, process: Process) -> list[str]:
    """Return the models, prompts and other files of the run file that `process` reads."""
    config = plan.config
    chat = [config.model.path, config.model.chat_template]
    found: dict[Task, list[str]] = {
        "buffer": [name for name in _prompts_of(config) if not is_function(name)],
        "relay": [],
        "part": [],
        "train": [config.model.path, config.critic.path],
        "generate": chat,
        "reward": chat,
        "ref_logp": [config.model.path, config.scorer.model],
    }
    return found.get(process.task, [config.model.path])


def modules_of(config: RunConfig, run_file: Path) -> str:
    """Return the folder of the user's own modules; empty if the run names none."""
    named = [name for name in _prompts_of(config) if is_function(name)]
    for one in config.all_environments:
        named += [one.kind, *one.rewards, one.agent, one.id]
    return str(run_file.resolve().parent) if any(":" in name for name in named) else ""


def _prompts_of(config: RunConfig) -> list[str]:
    environments = [one.prompts for one in config.environments]
    return [*config.data.sources, *environments, config.eval.prompts]


def _hub(plan: Plan) -> str:
    return f"tcp://{plan.the('weight_hub').node.address}:{plan.cluster.port(Port.WEIGHTS)}"
