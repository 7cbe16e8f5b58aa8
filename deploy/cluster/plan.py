"""Placement: a cluster and a run in, processes on nodes out. Nothing is read or written.

Nodes or GPUs are divided among groups of tasks by their ratios. The rule, in order:

1. A group is due `ratio * units`.
2. It gets the whole part of that, but one unit at least.
3. The rest goes, unit by unit, to the group that is furthest below its due; if too much was
   given (because of the least of one), units come back from the group furthest above its due that
   has more than one. Of equals, the one named first gets, and the one named last gives. A group
   that has all that it can use gets no more; what nobody can use stays idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec

from umbra.deploy.cluster.cluster_file import (
    FOREIGN_TASKS,
    ClusterFile,
    ClusterSpec,
    Node,
    Port,
    Task,
)
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

TOLERANCE = Fraction(1, 1000)  # ratios are written with a few digits: 0.333
TASKS = ("train", "generate", "ref_logp", "logp", "reward")


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that share nodes: each task may use all GPUs of the group.

    `gpus[i]` are those on `nodes[i]`, none on a cluster without any. `arithmetic` says how many
    units the group got, and why.
    """

    tasks: tuple[str, ...]
    nodes: tuple[Node, ...]
    gpus: tuple[tuple[int, ...], ...]
    arithmetic: str

    @property
    def has_gpus(self) -> bool:
        return any(self.gpus)

    def describe(self) -> str:
        return f"group [{', '.join(self.tasks)}]"


def place_groups(file: ClusterFile, config: RunConfig) -> list[TaskGroup]:
    """Return the groups with their shares of the nodes that do not join later, in file order.

    Nodes are given out in the order of the file. Where GPUs are divided the group that trains comes
    first and gets its GPUs on the first node that has as many, else on the fewest nodes.

    Raises:
        UsageError: tasks and ratios do not fit the run or the nodes; the sentence has the numbers.
    """
    tasks = [(group,) if isinstance(group, str) else tuple(group) for group in file.cluster.groups]
    _check_tasks(tasks, config)
    ratios = check_ratios(file.cluster.ratios, len(tasks))
    nodes = [node for node in file.nodes if not node.joins]
    with_gpus = [node for node in nodes if node.gpus]
    unit, needed = file.cluster.unit, config.trainer.nodes
    if not with_gpus and unit == "gpu":
        raise UsageError("cluster.unit = gpu, but no node has GPUs: write gpus = N in [[nodes]]")
    if not with_gpus and len(nodes) < len(tasks):
        groups = _deal_nodes(tasks, nodes)
    elif not with_gpus or unit == "node" or (unit == "auto" and len(with_gpus) >= len(tasks)):
        groups = _divide_nodes(tasks, ratios, with_gpus or nodes, needed)
    else:
        groups = _divide_gpus(tasks, ratios, with_gpus, needed)
    (training,) = (group for group in groups if "train" in group.tasks)
    if needed > 1 and len(training.nodes) != needed:
        raise UsageError(
            f"trainer.nodes = {needed}, but {training.describe()} gets {len(training.nodes)} "
            f"({training.arithmetic}): change its ratio, or leave trainer.nodes out"
        )
    return groups


def _check_tasks(groups: Sequence[tuple[str, ...]], config: RunConfig) -> None:
    tasks = [task for group in groups for task in group]
    for task in tasks:
        if task in FOREIGN_TASKS:
            raise UsageError(f"cluster.groups: {task} is called {FOREIGN_TASKS[task]} here")
        if task not in TASKS:
            raise UsageError(f"cluster.groups: unknown task {task!r}; known: {', '.join(TASKS)}")
        if tasks.count(task) > 1:
            raise UsageError(f"cluster.groups names {task} twice")
        if task not in ("train", "generate", *config.buffer.stages):
            raise UsageError(
                f"cluster.groups names {task}, but buffer.stages = {config.buffer.stages}: remove "
                "it, or add the stage to the run file"
            )
    needed = ["train", "generate", *(s for s in config.buffer.stages if s != "reward")]
    for task in needed:
        if task not in tasks:
            raise UsageError(f"cluster.groups lacks {task}: add it as a group, or to one")
    if not all(groups):
        raise UsageError("cluster.groups has an empty group")
    if ("reward",) in groups:
        raise UsageError(
            "cluster.groups gives nodes to reward alone, which needs no GPU: leave it out, and its "
            "scorers run on the buffer's node"
        )


def _divide_nodes(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: Sequence[Node],
    trainer_nodes: int,
) -> list[TaskGroup]:
    """Divide whole nodes; the trainer's share is rounded up only to `trainer_nodes`."""
    if len(nodes) < len(groups):
        raise UsageError(
            f"{len(groups)} groups need {len(groups)} nodes with GPUs, and there are {len(nodes)}: "
            "set cluster.unit to gpu, or join groups"
        )
    limits = [
        max(trainer_nodes, int((ratio + TOLERANCE) * len(nodes))) if "train" in tasks else None
        for tasks, ratio in zip(groups, ratios, strict=True)
    ]
    counts = divide(ratios, len(nodes), limits)
    task_groups: list[TaskGroup] = []
    start = 0
    for tasks, ratio, count in zip(groups, ratios, counts, strict=True):
        own_nodes = tuple(nodes[start : start + count])
        start += count
        arithmetic = _arithmetic(ratio, len(nodes), count, "nodes")
        gpus = tuple(tuple(range(node.gpus)) for node in own_nodes)
        task_groups.append(TaskGroup(tasks, own_nodes, gpus, arithmetic))
    return task_groups


def _divide_gpus(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: Sequence[Node],
    trainer_nodes: int,
) -> list[TaskGroup]:
    """Divide GPUs; the trainer's are on as few nodes as possible, equally many on each."""
    total = sum(node.gpus for node in nodes)
    if total < len(groups):
        raise UsageError(
            f"{len(groups)} groups need {len(groups)} GPUs at least, and the nodes have {total}: "
            "join groups in one list, so that they share"
        )
    counts = divide(ratios, total, [None] * len(groups))
    free = {node.name: list(range(node.gpus)) for node in nodes}
    order = sorted(range(len(groups)), key=lambda i: "train" not in groups[i])
    task_groups: dict[int, TaskGroup] = {}
    for index in order:
        tasks, count = groups[index], counts[index]
        arithmetic = _arithmetic(ratios[index], total, count, "GPUs")
        if "train" in tasks:
            homes = _fewest_nodes(count, nodes, trainer_nodes)
            if not homes:
                over = f"over {trainer_nodes} nodes (trainer.nodes) " if trainer_nodes > 1 else ""
                raise UsageError(
                    f"group [{', '.join(tasks)}] gets {count} GPUs ({arithmetic}), which cannot be "
                    f"divided {over}in equal parts, as a trainer's must be; the nodes have "
                    f"{', '.join(str(node.gpus) for node in nodes)}: change its ratio"
                )
            shares = {node.name: _take(free[node.name], count // len(homes)) for node in homes}
        else:
            shares = {}
            for node in nodes:
                shares[node.name] = _take(free[node.name], count - sum(map(len, shares.values())))
        own_nodes = tuple(node for node in nodes if shares.get(node.name))
        gpus = tuple(tuple(shares[node.name]) for node in own_nodes)
        task_groups[index] = TaskGroup(tasks, own_nodes, gpus, arithmetic)
    return [task_groups[index] for index in range(len(groups))]


def _fewest_nodes(count: int, nodes: Sequence[Node], trainer_nodes: int) -> list[Node]:
    """Return the fewest nodes (or `trainer_nodes`) that have `count` GPUs in equal parts."""
    for number in [trainer_nodes] if trainer_nodes > 1 else range(1, len(nodes) + 1):
        candidates = [node for node in nodes if node.gpus * number >= count]
        if count % number == 0 and len(candidates) >= number:
            return candidates[:number]
    return []


def _deal_nodes(groups: Sequence[tuple[str, ...]], nodes: Sequence[Node]) -> list[TaskGroup]:
    """Deal nodes in turn, where there are fewer nodes than groups and no GPUs."""
    return [
        TaskGroup(tasks, (node,), ((),), f"node {node.name}, as there are no GPUs to divide")
        for index, tasks in enumerate(groups)
        for node in [nodes[index % len(nodes)]]
    ]


def _take(free: list[int], count: int) -> list[int]:
    indices = free[:count]
    del free[:count]
    return indices


def _arithmetic(ratio: Fraction, units: int, count: int, unit: str) -> str:
    share = ratio * units
    rounded = "" if share == count else f", rounded to {count}"
    return f"ratio {float(ratio):.3g} x {units} {unit} = {float(share):.3g}{rounded}"


def check_ratios(ratios: Sequence[float], groups: int) -> list[Fraction]:
    """Return the ratios as exact numbers that add up to 1; equal ones if there are none.

    Raises:
        UsageError: another number of ratios than groups, or a sum that is not 1.
    """
    if not ratios:
        return [Fraction(1, groups)] * groups
    if len(ratios) != groups:
        raise UsageError(
            f"cluster.ratios has {len(ratios)} numbers for {groups} groups: give one to each"
        )
    exact = [Fraction(str(ratio)) for ratio in ratios]
    total = sum(exact, Fraction(0))
    if abs(total - 1) > TOLERANCE * groups:
        terms = " + ".join(f"{ratio:g}" for ratio in ratios)
        raise UsageError(f"cluster.ratios: {terms} = {float(total):g}, and not 1")
    return [ratio / total for ratio in exact]


def divide(ratios: Sequence[Fraction], units: int, limits: Sequence[int | None]) -> list[int]:
    """Return the units of each group by the rule above.

    Args:
        ratios: add up to 1.
        units: at least as many as groups.
        limits: the most that a group can use; None is any number.

    Raises:
        ValueError: fewer units than groups.
    """
    if units < len(ratios):
        raise ValueError(f"{units} units for {len(ratios)} groups")
    exact = [ratio * units for ratio in ratios]
    counts = [max(1, int(share)) for share in exact]
    indices = range(len(exact))
    while sum(counts) > units:
        candidates = [i for i in indices if counts[i] > 1]
        counts[max(candidates, key=lambda i: (counts[i] - exact[i], i))] -= 1
    while sum(counts) < units:
        candidates = [i for i in indices if (limit := limits[i]) is None or counts[i] < limit]
        if not candidates:
            break
        counts[max(candidates, key=lambda i: (exact[i] - counts[i], -i))] += 1
    return counts


STAGES: tuple[Task, ...] = ("ref_logp", "logp", "reward")


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it does, on which node, and with which of its GPUs.

    `node_rank` counts the nodes of a trainer that has several, for the processes on each.
    """

    name: str
    task: Task
    node: Node
    gpus: tuple[int, ...] = ()
    node_rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run on a cluster; its `config` says how the trainer is spread, as the plan has it."""

    run_id: str
    config: RunConfig
    cluster: ClusterSpec
    nodes: tuple[Node, ...]
    groups: tuple[TaskGroup, ...]
    processes: tuple[Process, ...]

    def on(self, node: Node) -> list[Process]:
        """Return the processes of `node` in the order in which they start."""
        return [process for process in self.processes if process.node == node]

    def the(self, task: Task) -> Process:
        """Return the only process that does `task`; of a trainer's the one with rank 0."""
        (process,) = (p for p in self.processes if p.task == task and not p.node_rank)
        return process

    def trainers(self) -> list[Process]:
        """Return the trainer's process on each of its nodes, by node rank."""
        return [process for process in self.processes if process.task == "train"]

    def idle(self, node: Node) -> list[int]:
        busy = {gpu for process in self.on(node) for gpu in process.gpus}
        return [gpu for gpu in range(node.gpus) if gpu not in busy]

    def shares_gpus(self) -> bool:
        assigned = [
            (process.node.name, gpu)
            for process in self.processes
            if process.task not in ("weight_hub", "relay", "part")
            for gpu in process.gpus
        ]
        return len(assigned) != len(set(assigned))

    def readdressed(self, address: Callable[[Node], str]) -> Plan:
        """Return the plan with other addresses of nodes, for launchers that give them."""

        def relocate(node: Node) -> Node:
            return msgspec.structs.replace(node, address=address(node))

        processes = tuple(replace(p, node=relocate(p.node)) for p in self.processes)
        return replace(self, nodes=tuple(map(relocate, self.nodes)), processes=processes)

    @property
    def on_gpus(self) -> bool:
        return any(node.gpus for node in self.nodes)


def make_plan(file: ClusterFile, config: RunConfig, run_id: str) -> Plan:
    """Place the processes of the run on the nodes.

    Args:
        config: of the run, with absolute paths; it need not be feasible before the plan has said
            how many ranks and nodes the trainer has.
        run_id: names the folder of the run's results.

    Raises:
        UsageError: it cannot be done; the sentence has the numbers.
    """
    if not config.model.path:
        raise UsageError("model.path is empty: name the model's directory in the run file")
    if config.generator.urls:
        raise UsageError(
            "generator.urls: a plan starts engines of its own; with servers that others start, run "
            "`umbra up` with generator.count = 0, and `umbra generator` beside the servers"
        )
    plane = config.weight_hub.plane
    if plane == "cuda_ipc":
        raise UsageError(
            "weight_hub.plane = cuda_ipc joins processes of one container or host: leave it on auto"
        )
    if plane == "nccl" and file.cluster.network != "host":
        raise UsageError(
            "weight_hub.plane = nccl opens ports of its own: set cluster.network to host, or leave "
            "the plane on auto"
        )
    groups = place_groups(file, config)
    nodes = tuple(file.nodes)
    staying = [node for node in nodes if not node.joins]
    broker = next((node for node in staying if node.name == file.cluster.broker), staying[0])
    (training,) = (group for group in groups if "train" in group.tasks)
    home = training.nodes[0]
    ranks = _ranks_per_node(config, training)
    config = _spread_config(config, training, ranks, file.cluster)
    processes = [
        Process("buffer", "buffer", broker),
        Process("weight-hub", "weight_hub", home, _first_gpu(file, config, home)),
        *_relays(file, config, groups, home),
        *_parts(training),
        *_trainers(training, ranks),
        *_generators(config, groups),
        *_joining(config, nodes, groups),
        *_scorers(config, groups, broker),
    ]
    return Plan(run_id, config, file.cluster, nodes, tuple(groups), tuple(processes))


def _first_gpu(file: ClusterFile, config: RunConfig, node: Node) -> tuple[int, ...]:
    """Return the GPU that hub and relays send from, where plane `nccl` may be chosen for them.

    It never is where no host has all of a version: with several trainer nodes.
    """
    several = len(file.nodes) > 1 and config.trainer.nodes == 1
    uses_nccl = {"nccl": True, "auto": file.cluster.network == "host" and several}
    return (0,) if uses_nccl.get(config.weight_hub.plane, False) and node.gpus else ()


def _relays(
    file: ClusterFile, config: RunConfig, groups: list[TaskGroup], home: Node
) -> Iterator[Process]:
    """Yield a relay for every node but the hub's that receives weights."""
    receiving = {
        node.name
        for group in groups
        if "generate" in group.tasks or "logp" in group.tasks
        for node in group.nodes
    }
    for node in file.nodes:
        if node != home and (node.joins or node.name in receiving):
            yield Process(f"relay-{node.name}", "relay", node, _first_gpu(file, config, node))


def _ranks_per_node(config: RunConfig, group: TaskGroup) -> int:
    """Return the trainer's ranks per node: one per GPU, or as trainer.ranks says."""
    ranks, nodes = config.trainer.ranks, len(group.nodes)
    smallest, largest = min(map(len, group.gpus)), max(map(len, group.gpus))
    if largest and ranks == 1:
        if smallest != largest:
            has = ", ".join(
                f"{node.name} {len(gpus)}"
                for node, gpus in zip(group.nodes, group.gpus, strict=True)
            )
            raise UsageError(
                f"a trainer has as many ranks on each of its nodes, but the nodes of "
                f"{group.describe()} have different numbers of GPUs ({has}): set trainer.ranks to "
                f"{smallest * nodes}, or list nodes of one kind first"
            )
        return smallest
    if ranks % nodes:
        raise UsageError(
            f"trainer.ranks = {ranks} cannot be divided equally over the {nodes} nodes of "
            f"{group.describe()} ({group.arithmetic}): set it to a multiple of {nodes}, or change "
            "its ratio"
        )
    if largest and ranks > smallest * nodes:
        raise UsageError(
            f"trainer.ranks = {ranks}, but {group.describe()} has {smallest * nodes} GPUs "
            f"({group.arithmetic}): raise its ratio, or lower trainer.ranks"
        )
    return ranks // nodes


def _spread_config(
    config: RunConfig, group: TaskGroup, ranks: int, cluster: ClusterSpec
) -> RunConfig:
    """Return `config` with the trainer's nodes, all its ranks, and its rendezvous."""
    nodes, trainer = len(group.nodes), config.trainer
    rendezvous = trainer.rendezvous
    if nodes > 1:
        if trainer.rendezvous:
            raise UsageError(
                f"trainer.rendezvous = {trainer.rendezvous}, but the plan chooses where a "
                "trainer's ranks meet: leave it out"
            )
        if ranks % trainer.sequence_parallel:
            raise UsageError(
                f"trainer.sequence_parallel = {trainer.sequence_parallel} does not divide the "
                f"{ranks} ranks on each node of {group.describe()}: ranks that share the tokens of "
                "a row have to be on one node"
            )
        if config.weight_hub.plane in ("shm", "nccl"):
            raise UsageError(
                f"weight_hub.plane = {config.weight_hub.plane} sends from one host, and the "
                f"trainer's weights are on {nodes}: leave it on auto"
            )
        rendezvous = f"{group.nodes[0].address}:{cluster.port(Port.RENDEZVOUS)}"
    replace = msgspec.structs.replace
    resolved = replace(trainer, nodes=nodes, ranks=nodes * ranks, rendezvous=rendezvous)
    return replace(config, trainer=resolved)


def _parts(group: TaskGroup) -> Iterator[Process]:
    """Yield a part hub for each node of the trainer but the hub's."""
    for rank, node in enumerate(group.nodes[1:], 1):
        yield Process(f"part-{node.name}", "part", node, node_rank=rank)


def _trainers(group: TaskGroup, ranks: int) -> Iterator[Process]:
    for rank, (node, gpus) in enumerate(zip(group.nodes, group.gpus, strict=True)):
        name = f"trainer-{node.name}" if rank else "trainer"
        yield Process(name, "train", node, gpus[:ranks], node_rank=rank)


def _generators(config: RunConfig, groups: list[TaskGroup]) -> Iterator[Process]:
    """Yield as many as the GPUs of each node allow; generator.count without GPUs."""
    (group,) = (group for group in groups if "generate" in group.tasks)
    if not group.has_gpus:
        yield from _on_cpus(group, "generate", "generator", config.generator.count)
        return
    size = config.generator.tensor_parallel
    largest = max(map(len, group.gpus))
    if largest < size:
        raise UsageError(
            f"a generator needs {size} GPUs (generator.tensor_parallel), but "
            f"{group.describe()} has at most {largest} on one node ({group.arithmetic}): raise its "
            "ratio, or lower it"
        )
    for node, gpus in zip(group.nodes, group.gpus, strict=True):
        yield from _on_gpus("generate", "generator", node, gpus, size)


def _joining(
    config: RunConfig, nodes: tuple[Node, ...], groups: list[TaskGroup]
) -> Iterator[Process]:
    """Yield generators for all GPUs of nodes that join; one each on a run without GPUs."""
    on_gpus = any(group.has_gpus for group in groups if "generate" in group.tasks)
    size = config.generator.tensor_parallel
    for node in (node for node in nodes if node.joins):
        if not on_gpus:
            yield Process(f"generator-{node.name}-0", "generate", node)
        elif node.gpus < size:
            raise UsageError(
                f"node {node.name} joins to generate, and a generator needs {size} GPUs "
                f"(generator.tensor_parallel): it has {node.gpus}"
            )
        else:
            yield from _on_gpus("generate", "generator", node, tuple(range(node.gpus)), size)


def _scorers(config: RunConfig, groups: list[TaskGroup], broker: Node) -> Iterator[Process]:
    """Yield one per GPU for models; rewards run beside the buffer unless a group says."""
    for stage in STAGES:
        if stage not in config.buffer.stages:
            continue
        name, count = stage.replace("_", "-"), config.scorer.processes(stage)
        group = next((group for group in groups if stage in group.tasks), None)
        if group is None:  # of rewards alone: `place_groups` has checked it
            for index in range(count):
                yield Process(f"{name}-{broker.name}-{index}", stage, broker)
        elif stage == "reward" or not group.has_gpus:
            yield from _on_cpus(group, stage, name, count)
        else:
            for node, gpus in zip(group.nodes, group.gpus, strict=True):
                yield from _on_gpus(stage, name, node, gpus, 1)


def _on_gpus(
    task: Task, name: str, node: Node, gpus: tuple[int, ...], size: int
) -> Iterator[Process]:
    for index in range(len(gpus) // size):
        share = gpus[index * size : (index + 1) * size]
        yield Process(f"{name}-{node.name}-{index}", task, node, share)


def _on_cpus(group: TaskGroup, task: Task, name: str, count: int) -> Iterator[Process]:
    """Yield `count` processes without GPUs, dealt to the group's nodes, one each at least."""
    nodes = group.nodes
    for index in range(max(count, len(nodes))):
        node = nodes[index % len(nodes)]
        yield Process(f"{name}-{node.name}-{index // len(nodes)}", task, node)
